"""A grammar as a rule: a pure function of the output ids, one mask per node, moved by committed ids alone.

The known faults: a mask from an unverified prefix, no way back after a rejection, an end or a call's beginning inside
a draft. Each has a rule that is broken in that way, and which the same test finds out.
"""

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from betoken.client import ToolFormat
from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.gateway.tool_calls.grammar import CallableTool, call_grammar
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import Constraint
from tests.router.harness import byte_tokenizer_json

GRAMMARS = Grammars(byte_tokenizer_json())
VOCAB_SIZE = GRAMMARS.vocab_size
EOS = 0
PARAMS = SamplingParams(temperature=0.9, seed=7, eos_token_ids=(EOS,))
MakeRule = Callable[[Constraint, list[int]], GrammarRule]


def ids_of(text: str) -> list[int]:
    return GRAMMARS._tokenizer.tokenize_str(text)


def rule_of(constraint: Constraint, output_ids: list[int]) -> GrammarRule:
    return GrammarRule(GRAMMARS.compile(constraint), VOCAB_SIZE, (EOS,), output_ids)


def masks(rule: GrammarRule, output_ids: list[int], draft_ids: list[int], parents: list[int] | None = None) -> list:
    """Per row the allowed ids; None where a row is nobody's."""
    path = SequenceRules(PARAMS, [1], output_ids, rule).rows(draft_ids, parents)
    if path is None or path.allowed is None:
        return [None] * (len(draft_ids) + 1)
    bits = np.unpackbits(path.allowed.view(np.uint8), axis=1, bitorder="little")
    rows = [set(np.flatnonzero(row).tolist()) for row in bits]
    return [None if len(row) >= 32 * path.allowed.shape[1] else row for row in rows]


def alone(constraint: Constraint, output_ids: list[int]) -> set[int] | None:
    return masks(rule_of(constraint, output_ids), output_ids, [])[0]


NUMBERS = Constraint(json_schema='{"type": "array", "items": {"type": "integer"}, "maxItems": 4}')
MARK = "<tool_call>"
CALL = Constraint(
    lark=call_grammar(ToolFormat("hermes", {}), [CallableTool("now", None)], is_required=False, is_parallel=False)
)
WORDS = Constraint(choice={"texts": ["red", "reed", "green"]})


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [("", "rg", "eod"), ("r", "e", "rd"), ("re", "de", "r"), ("reed", "", "abcdefghij"), ("red", "", "red")],
)
def test_a_grammar_mask_allows_the_ids_that_may_follow(text: str, allowed: str, refused: str) -> None:
    row = alone(WORDS, ids_of(text))
    assert row is not None
    assert {*ids_of(allowed)} <= row and row.isdisjoint(ids_of(refused))
    assert (EOS in row) == (text in ("red", "reed"))


def test_eos_is_allowed_exactly_where_the_grammar_may_end() -> None:
    text = "[12, 3]"
    for length in range(len(text) + 1):
        row = alone(NUMBERS, ids_of(text[:length]))
        assert row is not None and (EOS in row) == (length == len(text))
    assert alone(NUMBERS, ids_of(text)) == {EOS}


def test_every_end_id_is_allowed_where_the_grammar_may_end() -> None:
    rule = GrammarRule(GRAMMARS.compile(WORDS), VOCAB_SIZE, (EOS, 5, 400), ids_of("red"))
    assert masks(rule, ids_of("red"), [])[0] == {EOS, 5, 400}
    rule = GrammarRule(GRAMMARS.compile(WORDS), VOCAB_SIZE, (EOS, ids_of("g")[0]), [])
    assert masks(rule, [], [])[0] == {ids_of("r")[0]}, "an end id is no text"


def check_nodes(make: MakeRule) -> None:
    check_rows(make, NUMBERS, "[12, -3,4", "]x ,1")


def check_calls(make: MakeRule) -> None:
    """Where a call of a tool may begin in free text, a draft over its mark has the call's masks behind it."""
    check_rows(make, CALL, f'so {MARK}\n{{"name": "now", ', f'{MARK} "n')


def check_rows(make: MakeRule, constraint: Constraint, said: str, others: str) -> None:
    """Rows of chains and trees have the masks of their paths as committed output, whatever came before.

    `others`: characters that are drafted beside those of the text `said`.
    """
    rng = random.Random(0)
    text = ids_of(said)
    for start in range(len(text)):
        output = text[:start]
        rule = make(constraint, list(output))
        for _ in range(6):  # the same rule again and again: nothing of a block may stay
            good = text[start : start + rng.randrange(5)]
            drafts = [token if rng.random() < 0.8 else rng.choice(ids_of(others)) for token in good]
            parents = [rng.randrange(-1, node) if rng.random() < 0.4 else node - 1 for node in range(len(drafts))]
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append([*(paths[parent] if parent >= 0 else []), drafts[node]])
            for row, path in zip(masks(rule, output, drafts, parents), [[], *paths], strict=True):
                matcher_says = GRAMMARS.num_allowed(GRAMMARS.compile(constraint), [*output, *path], (EOS,))
                if matcher_says == len(output) + len(path):
                    assert row == alone(constraint, [*output, *path])
                else:
                    assert row is None, "a row that follows what is refused is chosen by nobody"


def check_rejections(make: MakeRule) -> None:
    """After every block the rule stands at what was committed, though other ids were drafted."""
    rng = random.Random(1)
    for _ in range(20):
        output: list[int] = []
        rule = make(NUMBERS, output)
        while len(output) < 12 and not (output and output[-1] == EOS):
            drafts = [rng.choice(ids_of("[]1, 2")) for _ in range(rng.randrange(5))]
            rows = masks(rule, output, drafts)
            emitted: list[int] = []
            for row, draft in zip(rows, [*drafts, -1], strict=True):
                assert row == alone(NUMBERS, [*output, *emitted])
                token = rng.choice(sorted(row))
                emitted.append(token)
                if token != draft or token == EOS:
                    break
            output.extend(emitted)
            rule.commit(emitted)


def check_ends(make: MakeRule) -> None:
    """An end inside a draft ends the answer for what follows it there, and for nothing else."""
    output = ids_of("red")
    rule = make(WORDS, list(output))
    assert masks(rule, output, [EOS, *ids_of("g")]) == [{EOS}, None, None]
    assert masks(rule, output, [EOS, ids_of("x")[0]], [-1, -1]) == [{EOS}, None, None]
    assert masks(rule, output, []) == [{EOS}], "the end was a draft, and nobody's yet"
    before = ids_of("re")
    rule = make(WORDS, list(before))
    e, d = ids_of("ed")
    rows = masks(rule, before, [EOS, d, EOS, e, d], [-1, -1, 1, -1, 3])
    assert rows == [{e, d}, None, {EOS}, None, {d}, {EOS}]
    rule.commit([d, EOS])
    assert masks(rule, [*before, d, EOS], [e]) == [None, None], "what follows the end is nobody's"


CHECKS = {
    "unverified prefix": check_nodes,
    "no way back": check_rejections,
    "an end in a draft": check_ends,
    "a call's beginning in a draft": check_calls,
}


@pytest.mark.parametrize("fault", CHECKS)
def test_the_grammar_has_none_of_the_known_faults(fault: str) -> None:
    CHECKS[fault](rule_of)


class Unverified(GrammarRule):
    """Every row of a block gets the mask of its first."""

    def _walk(self, ahead, draft_ids, parents, visit):  # type: ignore[no-untyped-def]
        for node in range(-1, len(draft_ids)):
            visit(node, False)


class NoWayBack(GrammarRule):
    """What was drafted stays read."""

    def _walk(self, ahead, draft_ids, parents, visit):  # type: ignore[no-untyped-def]
        visit(-1, False)
        for node, token_id in enumerate(draft_ids):
            if not self._read(token_id):
                break
            visit(node, False)


class EndIsText(GrammarRule):
    """An end inside a draft is taken for the answer's."""

    def _walk(self, ahead, draft_ids, parents, visit):  # type: ignore[no-untyped-def]
        super()._walk(ahead, draft_ids, parents, visit)
        self._has_ended |= bool(self._eos_ids & {*draft_ids})


class CallsBeginWhenCommitted(GrammarRule):
    """What follows a call's mark within the same draft is still free text."""

    def _walk(self, ahead, draft_ids, parents, visit):  # type: ignore[no-untyped-def]
        ends = [node for node, token_id in enumerate(draft_ids) if token_id == ids_of(MARK)[-1]]
        first = ends[0] if ends else len(draft_ids)
        super()._walk(ahead, draft_ids[:first], parents[:first], visit)
        for node in range(first, len(draft_ids)):
            visit(node, False)


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("unverified prefix", Unverified),
        ("no way back", NoWayBack),
        ("an end in a draft", EndIsText),
        ("a call's beginning in a draft", CallsBeginWhenCommitted),
    ],
)
def test_each_known_fault_of_a_grammar_would_be_found(fault: str, broken: type[GrammarRule]) -> None:
    with pytest.raises(AssertionError):
        CHECKS[fault](lambda constraint, output: broken(GRAMMARS.compile(constraint), VOCAB_SIZE, (EOS,), output))


def test_a_block_under_a_grammar_equals_its_rows_one_by_one() -> None:
    params = SamplingParams(temperature=0.8, seed=3, presence_penalty=0.5, min_new_tokens=3, eos_token_ids=(EOS,))
    output, drafts, parents = ids_of("[1"), ids_of("2,]3]"), [-1, 0, 1, -1, 3]
    paths = [[], drafts[:1], drafts[:2], drafts[3:4], drafts[3:5]]  # node 2 is refused
    for seed in range(20):
        logits = torch.randn(6, 288, generator=torch.Generator().manual_seed(seed))
        rules = SequenceRules(params, [1], output, rule_of(NUMBERS, output))
        together = choose_tokens(logits, [SampleGroup(params, [1], output, drafts, rules, parents)]).token_ids
        assert all(token_id < VOCAB_SIZE for row, token_id in enumerate(together) if row != 3), "no padding"
        for row, path in zip([0, 1, 2, 4, 5], paths, strict=True):
            committed = [*output, *path]
            own = SequenceRules(params, [1], committed, rule_of(NUMBERS, committed))
            group = SampleGroup(params, [1], committed, [], own)
            assert choose_tokens(logits[row : row + 1], [group]).token_ids == [together[row]]
            ahead = SampleGroup(params, [1], committed, [], rules)
            assert choose_tokens(logits[row : row + 1], [ahead]).token_ids == [together[row]], "as a drafter asks"


def test_an_end_id_that_alone_is_allowed_precedes_min_new_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_new_tokens=50, eos_token_ids=(EOS,))
    for text, expected in (("red", EOS), ("re", ids_of("e")[0])):
        output = ids_of(text)
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, ids_of("e")[0]] = 1.0
        rules = SequenceRules(params, [1], output, rule_of(WORDS, output))
        assert choose_tokens(logits, [SampleGroup(params, [1], output, [], rules)]).token_ids == [expected]


def test_drafts_are_cut_where_the_grammar_refuses() -> None:
    output = ids_of("[1")
    rules = SequenceRules(PARAMS, [1], output, rule_of(NUMBERS, output))
    x = ids_of("x")[0]
    assert rules.allowed_nodes(ids_of("2,3x,")) == [0, 1, 2]
    assert rules.allowed_nodes([x, *ids_of("2")]) == []
    assert rules.allowed_nodes([*ids_of("]"), EOS, *ids_of("2")]) == [0, 1]
    assert rules.allowed_nodes([x, *ids_of("2,"), x, *ids_of("3")], [-1, -1, 1, 2, 2]) == [1, 2, 4]
    assert SequenceRules(PARAMS, [1], output).allowed_nodes([x]) == [0]


def test_a_grammar_rebuilt_after_the_output_is_the_same() -> None:
    text = ids_of("[12, -3,4]")
    rule = rule_of(NUMBERS, [])
    for index, token_id in enumerate(text):
        rule.commit([token_id])
        assert masks(rule, text[: index + 1], []) == masks(rule_of(NUMBERS, text[: index + 1]), text[: index + 1], [])


def test_an_output_that_the_grammar_rejects_has_an_error_and_no_token() -> None:
    output = ids_of("rx")
    rules = SequenceRules(PARAMS, [1], output, rule_of(WORDS, output))
    assert "not allowed" in rules.fault
    path = rules.rows([])
    assert path is not None and path.allowed is not None and not path.allowed.any()


def test_a_library_error_at_a_drafted_token_does_not_outlive_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    output = ids_of("[1")
    rule = rule_of(NUMBERS, output)
    expected = masks(rule, output, ids_of("2,"))
    broken = rule._matcher
    broken.consume_token(ids_of("x")[0])  # what a limit does: an error for good
    assert broken.is_error()
    rule._restore(output)
    assert rule._matcher is not broken and masks(rule, output, ids_of("2,")) == expected


@pytest.mark.parametrize("num_ids", [1, 3, 50])
def test_forced_ids_are_the_only_allowed_ids_of_their_position(num_ids: int) -> None:
    rng = random.Random(num_ids)
    properties = {"name": {"enum": ["red", "reed"]}, "n": {"const": 17}}
    schema = json.dumps({"type": "object", "properties": properties, "required": ["name", "n"]})
    num_forced = 0
    for constraint in (Constraint(json_schema=schema), WORDS, Constraint(regex="(ab|cd)efgh[0-9]ij")):
        output_ids: list[int] = []
        for _ in range(40):
            rule = rule_of(constraint, output_ids)
            before = alone(constraint, output_ids)
            forced, expected = rule.forced_ids(output_ids, num_ids), []
            while len(expected) < num_ids:
                row = alone(constraint, [*output_ids, *expected])
                if row is None or len(row) != 1 or row == {EOS}:
                    break
                expected += row
            assert forced == expected, (output_ids, forced, expected)
            assert masks(rule, output_ids, [])[0] == before, "asking moves nothing"
            num_forced += len(forced)
            if not before or before == {EOS}:
                assert rule.forced_ids(output_ids, num_ids) == []
                break
            output_ids.append(rng.choice(sorted(before - {EOS})) if before - {EOS} else EOS)
    assert num_forced > 10
