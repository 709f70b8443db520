"""choose_tokens: which row sees which history, fast path and general path, logprobs, independence from the batch."""

import dataclasses
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from betoken.engine.rules.logits_rules import BlockPath, LogitsRule, RepetitionRule, follow_rules, make_rules
from betoken.engine.rules.prompt import Prompt
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampler import Chosen, SampleGroup, TokenLogprob, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.kernels import dispatch, native

GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=-0.2,
    logit_bias=((3, 2.5), (0, -1.0)),
    seed=2**64 - 5,
    min_new_tokens=4,
    eos_token_ids=(1,),
    stop_token_ids=(2,),
    num_logprobs=3,
)


def random_logits(
    num_rows: int, vocab_size: int = 96, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)


def rows_one_by_one(logits: torch.Tensor, groups: list[SampleGroup]) -> Chosen:
    """Every row as a separate draft, in a separate call."""
    token_ids, logprobs, row = [], [], 0
    for group in groups:
        for i in range(group.num_rows):
            output_ids = [*group.output_ids, *group.draft_ids[:i]]
            alone = SampleGroup(group.params, group.prompt_ids, output_ids, [])
            chosen = choose_tokens(logits[row : row + 1], [alone])
            token_ids += chosen.token_ids
            logprobs += chosen.logprobs
            row += 1
    return Chosen(token_ids, logprobs)


def test_a_block_equals_its_rows_one_by_one() -> None:
    for seed in range(30):
        groups = [
            SampleGroup(EVERYTHING, [5, 6, 7], [8, 8, 1], [9, 8, 5]),
            SampleGroup(GREEDY, [5], [], [4]),
            SampleGroup(dataclasses.replace(EVERYTHING, seed=seed, temperature=0.0), [9], [9], [9, 9, 9, 9]),
            SampleGroup(SamplingParams(seed=seed), [5, 6], [1], []),
            SampleGroup(SamplingParams(seed=seed, top_p=0.5, num_logprobs=0), [5, 6], [], [95]),
        ]
        logits = random_logits(14, seed=seed)
        assert choose_tokens(logits, groups) == rows_one_by_one(logits, groups)


def test_a_node_of_a_tree_equals_its_path_as_committed_output() -> None:
    draft_ids, parents = [9, 8, 5, 8, 8, 3], [-1, -1, 0, 0, 3, 1]
    paths = [[], [9], [8], [9, 5], [9, 8], [9, 8, 8], [8, 3]]
    for seed in range(20):
        params = dataclasses.replace(EVERYTHING, seed=seed)
        logits = random_logits(11, seed=seed)
        tree = SampleGroup(params, [5, 6, 7], [8, 8, 1], draft_ids, parents=parents)
        chain = SampleGroup(params, [4], [2], [7, 7, 7])
        alone = [SampleGroup(params, [5, 6, 7], [8, 8, 1, *path], []) for path in paths]
        assert choose_tokens(logits, [tree, chain]) == rows_one_by_one(logits, [*alone, chain])


def test_sampled_tokens_of_a_sequence_do_not_depend_on_other_sequences() -> None:
    groups = [
        SampleGroup(
            dataclasses.replace((EVERYTHING, GREEDY, SamplingParams(top_p=0.7))[i % 3], seed=i),
            [5, i],
            [i],
            [7] * (i % 2),
        )
        for i in range(46)
    ]
    num_rows = sum(group.num_rows for group in groups)
    logits = random_logits(num_rows, vocab_size=300)
    together = choose_tokens(logits, groups)
    assert num_rows >= 69
    for num_groups in range(1, len(groups) + 1):
        end = sum(group.num_rows for group in groups[:num_groups])
        part = choose_tokens(logits[:end], groups[:num_groups])
        assert part.token_ids == together.token_ids[:end] and part.logprobs == together.logprobs[:end]


@pytest.mark.skipif(not native.is_available(), reason="no C compiler")
def test_native_and_reference_sampling_choose_the_same_tokens() -> None:
    for seed in range(20):
        groups = [SampleGroup(dataclasses.replace(EVERYTHING, seed=seed), [5, 6], [8], [9, 8, seed])]
        logits = random_logits(4, vocab_size=1000, seed=seed)
        with dispatch.override("reference"):
            expected = choose_tokens(logits, groups)
        assert choose_tokens(logits, groups) == expected


def test_greedy_sampling_takes_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(3, 50, dtype=torch.bfloat16)
    logits[1, [7, 30]] = 1.0
    logits[2, 49] = 1.0
    assert choose_tokens(logits, [SampleGroup(GREEDY, [1], [], [2, 3])]).token_ids == [0, 7, 49]


def test_row_i_of_a_draft_follows_its_first_i_ids() -> None:
    """A bias towards 4 is undone once 4 is in the path: row 0 chooses 4, rows after the draft 4 do not."""
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias=((4, 1.0),))
    chosen = choose_tokens(torch.zeros(4, 8), [SampleGroup(params, [4], [], [6, 4, 6])])
    assert chosen.token_ids == [4, 4, 0, 0]


def test_min_new_tokens_ends_inside_a_block() -> None:
    params = SamplingParams(temperature=0.0, min_new_tokens=3, eos_token_ids=(5,), stop_token_ids=(6,))
    logits = torch.zeros(4, 8)
    logits[:, 5], logits[:, 6], logits[:, 2] = 9.0, 8.0, 1.0
    assert choose_tokens(logits, [SampleGroup(params, [1], [0], [0, 0, 0])]).token_ids == [2, 2, 5, 5]


class NoRepeat(LogitsRule):
    """Allows everything but the last id of the row's path."""

    def adjust(self, path: BlockPath) -> None:
        for row in range(len(path.draft_ids) + 1):
            last = path.followed_by(row)[-1]
            mask = np.full(3, -1, dtype=np.int32)
            mask[last >> 5] &= ~np.int32(1 << (last & 31))
            path.allow(row, mask)


def no_repeat() -> SequenceRules:
    return SequenceRules(GREEDY, [1], [40], extra=[NoRepeat()])


def test_a_rule_may_mask_rows_of_a_block() -> None:
    logits = torch.zeros(4, 70)
    logits[:, 40], logits[:, 2] = 2.0, 1.0
    groups = [
        SampleGroup(GREEDY, [1], [40], [2, 40], rules=no_repeat()),
        SampleGroup(GREEDY, [1], [40], []),
    ]
    assert choose_tokens(logits, groups).token_ids == [2, 40, 2, 40]


def test_a_rule_sees_each_node_s_own_path() -> None:
    logits = torch.zeros(4, 70)
    logits[:, 40], logits[:, 2] = 2.0, 1.0
    group = SampleGroup(GREEDY, [1], [40], [2, 40, 40], rules=no_repeat(), parents=[-1, -1, 0])
    assert choose_tokens(logits, [group]).token_ids == [2, 40, 2, 2]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(3)
    params = SamplingParams(temperature=0.0, num_logprobs=4, logit_bias=((11, 100.0),))
    chosen = choose_tokens(logits, [SampleGroup(params, [1], [], [2]), SampleGroup(GREEDY, [1], [], [])])
    assert chosen.token_ids[:2] == [11, 11] and chosen.logprobs[2] is None
    exact = torch.log_softmax(logits.float(), dim=1)
    for row in range(2):
        entry = chosen.logprobs[row]
        assert isinstance(entry, TokenLogprob)
        assert entry.logprob == float(exact[row, 11])
        assert entry.top_logprobs == exact[row].sort(descending=True).values[:4].tolist()
        assert entry.top_logprobs == [float(exact[row, i]) for i in entry.top_ids]


def test_logprobs_of_equal_ids_are_in_id_order() -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=5)
    entry = choose_tokens(torch.zeros(1, 4096), [SampleGroup(params, [1], [], [])]).logprobs[0]
    assert entry is not None and entry.top_ids == [0, 1, 2, 3, 4]


def test_sampling_does_not_change_the_logits() -> None:
    logits = random_logits(4, dtype=torch.float32)
    before = logits.clone()
    choose_tokens(logits, [SampleGroup(EVERYTHING, [5], [6], [7, 8, 9])])
    assert torch.equal(logits, before)


def test_ids_beyond_the_vocabulary_adjust_no_logits() -> None:
    """A draft model may know fewer ids than the target whose text it follows."""
    biased = dataclasses.replace(EVERYTHING, logit_bias=((3, 2.5), (99, 5.0)), eos_token_ids=(1, 120))
    known = dataclasses.replace(EVERYTHING, logit_bias=((3, 2.5),), eos_token_ids=(1,))
    for seed in range(10):
        logits = random_logits(3, seed=seed)
        foreign = choose_tokens(logits, [SampleGroup(biased, [5, 4000], [95, 7], [6, 8])])
        assert foreign == choose_tokens(logits, [SampleGroup(known, [5, 5], [95, 7], [6, 8])])


def test_bad_calls_of_the_sampler_are_rejected() -> None:
    with pytest.raises(ValueError, match="rows"):
        choose_tokens(random_logits(3), [SampleGroup(GREEDY, [1], [], [])])
    with pytest.raises(ValueError, match="contiguous"):
        choose_tokens(random_logits(96, 2).t(), [SampleGroup(GREEDY, [1], [], [2])])


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.1}])
def test_logits_rules_take_memory_for_their_adjusted_ids(settings: dict[str, float]) -> None:
    history, drafts = range(8192), range(63)
    tracemalloc.start()
    try:
        follow_rules(make_rules(SamplingParams(**settings)), history, history, drafts)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 64 * 8192 * 4, "counts, one adjustment and what is between them"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.005),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("seed", -1),
        ("seed", 2**64),
        ("max_new_tokens", 0),
        ("min_new_tokens", 2000),
        ("num_logprobs", 21),
        ("stop_token_ids", (-1,)),
    ],
)
def test_bad_sampling_parameters_are_rejected_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_rules_of_a_sequence_choose_as_those_made_for_one_call() -> None:
    prompt, output = [5, 6, 7], [8, 8, 1]
    rules = SequenceRules(EVERYTHING, prompt, output)
    for seed in range(10):
        logits = random_logits(4, seed=seed)
        groups = [SampleGroup(EVERYTHING, prompt, output, [9, 8, seed], each) for each in (rules, None)]
        assert choose_tokens(logits, groups[:1]) == choose_tokens(logits, groups[1:])
        output.append(seed)
        rules.commit([seed])


def test_rules_see_what_a_drafter_has_drafted() -> None:
    prompt, output = [5, 6, 7], [8]
    rules = SequenceRules(EVERYTHING, prompt, output)
    logits = random_logits(2)
    ahead = SampleGroup(EVERYTHING, prompt, [*output, 9, 9], [3], rules)
    assert choose_tokens(logits, [ahead]) == choose_tokens(logits, [SampleGroup(EVERYTHING, prompt, [8, 9, 9], [3])])


def test_a_prompt_is_scanned_once() -> None:
    num_scans = 0

    class Counting(Prompt):
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_scans
            num_scans += 1
            return np.array(list(self), *args, **kwargs)

    prompt, rule = Counting([7, 3, 7, 1]), RepetitionRule(2.0)
    paths = [follow_rules([rule], prompt, [3, 5], [1]) for _ in range(2)]
    assert num_scans == 1
    for path in (*paths, follow_rules([rule], [7, 3, 7, 1], [3, 5], [1])):
        assert path.token_ids.tolist() == [1, 3, 5, 7] and path.in_prompt.tolist() == [True, True, False, True]
        assert path.scale.tolist() == [[2.0] * 4] * 2
