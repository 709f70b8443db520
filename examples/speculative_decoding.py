"""Speculative decoding on one page: a small model drafts, one forward of the target judges, equality accepts.

The services do the same for many sequences over gRPC. The output is the target's own, whatever the draft model says.
`python examples/speculative_decoding.py` runs the embedded pair.
"""

from collections.abc import Sequence
from pathlib import Path

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.forward import StepOutput
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.kernels.accept import accept_block


class View:
    """One model's view of the sequence: its KV pages and how many ids they hold."""

    def __init__(self, runner: ModelRunner, params: SamplingParams, prompt_ids: Sequence[int]) -> None:
        self.runner, self.params, self.prompt_ids = runner, params, list(prompt_ids)
        self.page_ids: list[int] = []
        self.kv_length = 0

    def choose(self, output_ids: list[int], draft_ids: list[int]) -> list[int]:
        """The model's token after the output, and after each draft id: one forward, [len(draft_ids) + 1] ids."""
        ids = [*self.prompt_ids, *output_ids, *draft_ids]
        self.runner.page_table.extend(self.page_ids, len(ids))
        num_logits = len(draft_ids) + 1
        while len(ids) - self.kv_length > self.runner.max_num_batched_tokens:  # a long prompt goes in chunks
            self._forward(ids[self.kv_length :][: self.runner.max_num_batched_tokens - num_logits], 0)
        logits = self._forward(ids[self.kv_length :], num_logits).logits
        return choose_tokens(logits, [SampleGroup(self.params, self.prompt_ids, output_ids, draft_ids)]).token_ids

    def commit(self, output_ids: list[int]) -> None:
        """Forget the KV of refused ids. The last committed id has none yet."""
        self.kv_length = min(self.kv_length, len(self.prompt_ids) + len(output_ids) - 1)

    def _forward(self, ids: list[int], num_logits: int) -> StepOutput:
        segment = Segment(self.page_ids, self.kv_length, ids, num_logits)
        self.kv_length += len(ids)
        return self.runner.forward([segment])


def generate(
    target: ModelRunner, draft: ModelRunner, params: SamplingParams, prompt_ids: Sequence[int], num_draft_tokens: int
) -> tuple[list[int], int]:
    """The target's own `params.max_new_tokens` ids after the prompt, and how many forwards of it they took."""
    judge, guesser = (View(runner, params, prompt_ids) for runner in (target, draft))
    output_ids: list[int] = []
    num_forwards = 0
    while len(output_ids) < params.max_new_tokens:
        draft_ids: list[int] = []
        room = params.max_new_tokens - len(output_ids) - 1  # the target adds one token
        while len(draft_ids) < min(num_draft_tokens, room):  # draft: the guesser samples with the target's noise
            draft_ids += guesser.choose([*output_ids, *draft_ids], [])
        target_ids = judge.choose(output_ids, draft_ids)  # verify: one forward over all of them
        num_forwards += 1
        path, next_id = accept_block(target_ids, draft_ids)  # accept: the longest prefix that is the target's own
        output_ids += [*draft_ids[: len(path)], next_id]
        for view in (judge, guesser):  # commit
            view.commit(output_ids)
    for view in (judge, guesser):
        view.runner.page_table.release(view.page_ids)
    return output_ids, num_forwards


def main() -> None:
    """Generate with and without drafts and compare."""
    from transformers import AutoTokenizer

    models = Path(__file__).parents[1] / "models"
    target, draft = (load_runner(EngineConfig(str(models / name))) for name in ("target", "draft"))
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    prompt_ids = tokenizer.encode("def fibonacci(n):")
    params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=96)
    plain, num_plain = generate(target, draft, params, prompt_ids, num_draft_tokens=0)
    drafted, num_drafted = generate(target, draft, params, prompt_ids, num_draft_tokens=5)
    print(tokenizer.decode(drafted))
    equal = "equal" if plain == drafted else "different"
    print(f"{len(plain)} tokens, {equal}: {num_plain} target forwards plain, {num_drafted} with drafts")


if __name__ == "__main__":
    main()
