"""A small model distilled from a target: `betoken train draft --target DIR --draft DIR --prompts FILE --tokens N ...`.

Four divergences, on four kinds of data: given text, the target's own answers, the draft's own, or half of both. The
draft's answers are made anew while it learns. Without `--draft` it begins as some of the target's own layers.

Source: Zhou et al., DistillSpec, arXiv:2310.08461; on-policy data: Agarwal et al., arXiv:2306.13649.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.training.answers import cycled_params, write_answers
from betoken.training.batches import Batches, Rows, pad
from betoken.training.block_efficiency import Rounds
from betoken.training.distill import DIVERGENCES, Divergence
from betoken.training.loop import Progress, Step, run_loop
from betoken.training.model_card import table
from betoken.training.optimizer import PairOptimizer
from betoken.training.part_gradients import autocast, gradients_of, held_out_loss, part_tokens
from betoken.training.recipe import Recipe, recipe_parser, run_recipe
from betoken.training.recipe_card import Card, write_card
from betoken.training.samples import Sample, clip, read_prompts, read_texts
from betoken.training.teacher import Teacher

SOURCES = ("text", "target", "draft", "mix")
"""Kinds of data: given text, the target's answers, the draft's own answers, half of both."""
CHAIN = 5
"""Draft tokens a round when a draft is measured."""


class DraftTrainee(nn.Module):
    """The draft with its target."""

    def __init__(self, teacher: Teacher, draft: Any, divergence: Divergence) -> None:
        super().__init__()
        self.draft = draft
        self._teacher, self._divergence = teacher, divergence
        self.known_logits: dict[tuple[int, ...], torch.Tensor] = {}
        """The target's logits by the samples of a part, kept where `keeps_logits`."""
        self.keeps_logits = False

    def target_logits(self, rows: Rows) -> torch.Tensor:
        """[N, V] before every learnt token."""
        if (known := self.known_logits.get(rows.indices)) is not None:
            return known
        logits = self._teacher(rows.ids, ()).logits[:, :-1][rows.learnt[:, 1:]]
        if self.keeps_logits and rows.indices:
            self.known_logits[rows.indices] = logits
        return logits

    def forward(self, rows: Rows) -> torch.Tensor:
        """The divergence summed over the learnt tokens of a part of a batch."""
        logits = self.draft(input_ids=rows.ids, use_cache=False).logits[:, :-1][rows.learnt[:, 1:]]
        return self._divergence(self.target_logits(rows), logits).sum()


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a draft fits its target on the target's own answers."""

    greedy: float
    """Share of answer tokens that are the draft's likeliest, of greedy answers."""
    sampled: float
    """Mean of sum(min(target, draft)): the acceptance rate of speculative sampling at temperature 1."""
    block_efficiency: float
    """Tokens a forward with chains of `CHAIN`, of greedy answers."""
    rounds: Rounds = field(default_factory=Rounds)
    """The rounds of those chains; none where only the figures were kept."""


@torch.no_grad()
def agreement(teacher: Teacher, draft: Any, samples: Sequence[Sample]) -> Agreement:
    """Measure on greedy answers of the target."""
    draft.eval()
    rounds = Rounds()
    hits = overlap = num_tokens = 0.0
    for sample in samples:
        rows = pad([sample]).to(teacher.device)
        with autocast(teacher.device):
            ours = draft(input_ids=rows.ids, use_cache=False).logits[0, :-1].float()
        theirs = teacher(rows.ids, ()).logits[0, :-1].float()
        right = (ours.argmax(-1) == rows.ids[0, 1:]).tolist()
        lengths = [0] * len(sample.ids)
        for place in reversed(range(len(right))):
            lengths[place] = min(CHAIN, lengths[place + 1] + 1) if right[place] else 0
        rounds.add(lengths, sample.prompt_length, len(sample.ids))
        first = sample.prompt_length - 1
        hits += sum(right[first:])
        overlap += float(torch.minimum(ours[first:].softmax(-1), theirs[first:].softmax(-1)).sum())
        num_tokens += len(right) - first
    draft.train()
    return Agreement(hits / num_tokens, overlap / num_tokens, rounds.block_efficiency, rounds)


class SampleSource:
    """Batches of one kind of data, as a function of the step."""

    def __init__(self, kind: str, fixed: Sequence[Sample], rows: int, seed: int) -> None:
        """`fixed`: text or the target's answers; empty for the draft's own."""
        own = {"draft": rows, "mix": rows // 2}.get(kind, 0)
        self.num_own, self._seed = own, seed
        self._fixed = Batches(fixed, rows - own, seed) if rows > own else None
        self._own: Batches | None = None

    def renew(self, samples: Sequence[Sample], chunk: int) -> None:
        """Take the draft's newest answers."""
        self._own = Batches(samples, self.num_own, self._seed + 1000 + chunk)

    def __call__(self, step: int) -> Rows:
        """The batch of a step."""
        if self._own is None:
            assert self._fixed is not None
            return self._fixed(step)
        if self._fixed is None:
            own = self._own(step)
            return Rows(own.ids, own.learnt)
        return pad([*self._fixed.samples(step), *self._own.samples(step)])


class OwnAnswers:
    """The draft's answers, renewed every so many steps from its weights of that moment."""

    def __init__(self, recipe: Recipe, prompts: list[list[int]], draft: Any) -> None:
        self._recipe, self._prompts, self._draft = recipe, prompts, draft
        self._chunk = -1

    def __call__(self, step: int) -> tuple[int, list[Sample]] | None:
        """The answers for a step and their number, if they changed since the previous step."""
        options = self._recipe.options
        chunk = step // options.renew_every
        if chunk == self._chunk:
            return None
        self._chunk = chunk
        num = options.renew_every * options.batch_rows
        chosen = [self._prompts[(chunk * num + index) % len(self._prompts)] for index in range(num)]

        def params(runner: ModelRunner) -> Any:
            return cycled_params(runner, [1.0], options.max_new_tokens, options.seed + 1 + chunk)

        path = options.run_dir / f"own-{chunk:04d}.jsonl"
        return chunk, clip(write_answers(self._load, chosen, params, path), self._recipe.max_length)

    def _load(self) -> ModelRunner:
        options = self._recipe.options
        folder = options.run_dir / "draft_now"
        save_draft(self._draft, folder)
        config = EngineConfig(
            str(folder),
            dtype=options.dtype,
            device=options.device,
            num_threads=options.threads,
            compile="off",
            self_check=False,
        )
        return load_runner(config)


def save_draft(draft: Any, folder: Path) -> None:
    """Write bfloat16 safetensors and config.json; the draft stays as it is."""
    with torch.device("meta"):
        shipped = type(draft)(draft.config)
    shipped.load_state_dict({name: t.to(torch.bfloat16) for name, t in draft.state_dict().items()}, assign=True)
    shipped.tie_weights()
    shipped.config.dtype = torch.bfloat16
    shipped.save_pretrained(folder)


def initial_draft(options: argparse.Namespace, teacher: Teacher) -> Any:
    """The checkpoint of `--draft`, or `--num-layers` of the target's layers, evenly spread; float32."""
    if options.draft is not None:
        draft = Teacher.load(options.draft, "float32", options.device).model
    else:
        config = copy.deepcopy(teacher.model.config)
        num_all = config.num_hidden_layers
        kept = [round(index * (num_all - 1) / max(1, options.num_layers - 1)) for index in range(options.num_layers)]
        config.num_hidden_layers = options.num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[index] for index in kept]
        draft = type(teacher.model)(config)
        state = {name: tensor for name, tensor in teacher.model.state_dict().items() if ".layers." not in name}
        draft.load_state_dict(state, strict=False)
        for own, theirs in zip(draft.base_model.layers, kept, strict=True):
            own.load_state_dict(teacher.model.base_model.layers[theirs].state_dict())
        draft.to(torch.float32).to(teacher.device)
        draft.set_attn_implementation("sdpa")
    return draft.requires_grad_(True)


def fixed_samples(recipe: Recipe) -> list[Sample]:
    """Text or the target's answers, as the source asks."""
    options = recipe.options
    if options.source == "text":
        if options.texts is None:
            raise ValueError("source text: texts is needed")
        return clip(read_texts(options.texts, recipe.tokenizer()), recipe.max_length)
    if options.prompts is None:
        raise ValueError(f"source {options.source}: prompts is needed")
    if options.source == "draft":
        return []
    prompts = read_prompts(options.prompts, recipe.tokenizer(), options.num_prompts)
    return clip(recipe.answers(prompts), recipe.max_length)


def held_out_answers(recipe: Recipe) -> list[Sample]:
    """The target's greedy answers to the held-out prompts."""
    options = recipe.options
    prompts = read_prompts(options.held_out_prompts, recipe.tokenizer(), options.num_held_out)

    def params(runner: ModelRunner) -> Any:
        return cycled_params(runner, [0.0], options.max_new_tokens, options.seed, ignore_eos=True)

    return write_answers(recipe.load_runner, prompts, params, options.run_dir / "held_out.jsonl")


def distil(recipe: Recipe, trainee: DraftTrainee, teacher: Teacher, held_out: Sequence[Sample]) -> Progress:
    """Train the draft in place as the options say."""
    options = recipe.options
    source = SampleSource(options.source, fixed_samples(recipe), options.batch_rows, options.seed)
    own: Callable[[int], tuple[int, list[Sample]] | None] | None = None
    if source.num_own:
        own = OwnAnswers(recipe, read_prompts(options.prompts, recipe.tokenizer(), options.num_prompts), trainee.draft)

    def gradients(step: int, fraction: float) -> Step:
        if own is not None and (renewed := own(step)) is not None:
            source.renew(renewed[1], renewed[0])
        return gradients_of(trainee, source(step).to(teacher.device), part_tokens(teacher.head.weight.shape[0]))

    return run_loop(
        trainee,
        PairOptimizer(trainee, options.lr, options.lr / 5, 0.0),
        gradients,
        recipe.loop_settings,
        recipe.checkpoint,
        lambda model: held_out_loss(model, held_out[:32], teacher.device),
    )


def run(options: argparse.Namespace) -> None:
    """Distil, measure and write.

    Raises:
        OSError, ValueError: a file or an option is not as it has to be.
    """
    if (options.draft is None) == (options.num_layers is None):
        raise ValueError("draft, num_layers: exactly one of them says what the draft begins as")
    recipe = Recipe("draft", options)
    teacher = Teacher.load(options.target, options.dtype, options.device)
    trainee = DraftTrainee(teacher, initial_draft(options, teacher), DIVERGENCES[options.divergence])
    held_out = held_out_answers(recipe)
    before = agreement(teacher, trainee.draft, held_out)
    progress = distil(recipe, trainee, teacher, held_out)
    save_draft(trainee.draft, options.out)
    recipe.tokenizer().save_pretrained(options.out)
    after = agreement(teacher, trainee.draft, held_out)
    rows = [[name, *measured(found)] for name, found in (("before", before), ("after", after))]
    card = Card(
        title="Draft model",
        summary=f"A small model for `{options.target}`, begun as "
        + (f"`{options.draft}`." if options.draft else f"{options.num_layers} of its layers."),
        data=f"source `{options.source}`",
        loss=f"{options.divergence} of the whole vocabulary; Muon for matrices, AdamW for the rest, peak rate"
        f" {options.lr:g}, linear to zero from 40 %.",
        tables=[table(["", *MEASURES], rows)],
    )
    write_card(card, recipe, progress)


MEASURES = ("the same likeliest token", "acceptance at T = 1", f"tokens a forward, chains of {CHAIN}")
"""Columns of `measured`."""


def measured(found: Agreement) -> list[str]:
    """One row of a table."""
    return [f"{found.greedy:.3f}", f"{found.sampled:.3f}", f"{found.block_efficiency:.2f}"]


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Options of the command."""
    parser = recipe_parser(prog, "Distil a small model from a target.")
    add = parser.add_argument
    add("--draft", help="checkpoint to begin with, of the target's tokenizer")
    add("--num-layers", type=int, help="begin with so many of the target's layers instead, evenly spread")
    add("--held-out-prompts", type=Path, required=True, help="JSONL of prompts; the target's greedy answers measure")
    add("--divergence", choices=tuple(DIVERGENCES), default="forward-kl")
    add("--source", choices=SOURCES, default="target", help="given text, target's answers, draft's own, or both halves")
    add("--renew-every", type=int, default=16, help="steps after which the draft answers anew")
    add("--lr", type=float, default=5e-3, help="peak learning rate of matrices; the rest has a fifth")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run every stage that is not done yet."""
    options = make_parser("betoken.training.draft").parse_args(arguments)
    run_recipe("betoken.training.draft", run, options)


if __name__ == "__main__":
    main()
