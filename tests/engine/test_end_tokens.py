"""Constrained answers of vocabularies with several end tokens and user-defined marks: only the request's EOS ends."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from betoken.common.gguf import GgufHeader, read_tokenizer
from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampling import SamplingParams
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import Constraint

CONTROL, USER_DEFINED = 3, 4
MARKS = {"<|endoftext|>": CONTROL, "</s>": CONTROL, "<|im_end|>": CONTROL, "<eos>": CONTROL}
CALLS = {"<tool_call>": USER_DEFINED, "</tool_call>": USER_DEFINED, "<think>": USER_DEFINED}


def gguf_tokenizer() -> str:
    """A tokenizer.json out of a GGUF vocabulary of bytes, end tokens and user-defined marks."""
    marks, letters = MARKS | CALLS, sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*marks, *letters, "ab"],
        "tokenizer.ggml.token_type": [*marks.values(), *[1] * (len(letters) + 1)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
    }
    return read_tokenizer(GgufHeader(Path("a.gguf"), metadata, (), 0)).text


TOKENIZER = gguf_tokenizer()
FAST = Tokenizer.from_str(TOKENIZER)
GRAMMARS = Grammars(TOKENIZER)
IDS = {mark: FAST.token_to_id(mark) for mark in MARKS | CALLS}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def rule_of(constraint: Constraint, eos_ids: tuple[int, ...], output_ids: list[int]) -> GrammarRule:
    return GrammarRule(GRAMMARS.compile(constraint), GRAMMARS.vocab_size, eos_ids, output_ids)


def allowed_after(constraint: Constraint, eos_ids: tuple[int, ...], output_ids: list[int]) -> set[int]:
    rule = rule_of(constraint, eos_ids, output_ids)
    assert not rule.fault
    path = SequenceRules(SamplingParams(eos_token_ids=eos_ids), [1], output_ids, rule).rows([])
    assert path is not None and path.allowed is not None
    return set(np.flatnonzero(np.unpackbits(path.allowed.view(np.uint8)[0], bitorder="little")).tolist())


@pytest.mark.parametrize("eos", MARKS)
@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Constraint(choice={"texts": ["a", "ab"]}), "a"),
        (Constraint(json_object=True), '{"a": 1}'),
        (Constraint(json_schema=SCHEMA), '{"a": 1}'),
        (Constraint(regex="a+"), "a"),
        (Constraint(lark='start: "a" ("b" | "c")*'), "ab"),
    ],
)
def test_only_the_requests_own_eos_ends_a_constrained_answer(eos: str, constraint: Constraint, text: str) -> None:
    ids = FAST.encode(text).ids
    allowed = allowed_after(constraint, (IDS[eos],), ids)
    assert allowed & set(IDS.values()) == {IDS[eos]}
    for token_id in allowed - {IDS[eos]}:
        assert not rule_of(constraint, (IDS[eos],), [*ids, token_id]).fault


@pytest.mark.parametrize("mark", CALLS)
@pytest.mark.parametrize("template", ['start: "MARK" "x"', 'start: /MARK/ "x"', 'start: <[ID]> "x"', "start: /.*/"])
def test_every_id_that_a_grammar_mask_allows_is_accepted_whatever_its_kind(mark: str, template: str) -> None:
    constraint = Constraint(lark=template.replace("MARK", mark.replace("/", r"\/")).replace("ID", str(IDS[mark])))
    allowed = allowed_after(constraint, (2,), [])
    assert IDS[mark] in allowed
    for token_id in allowed - {2}:
        assert not rule_of(constraint, (2,), [token_id]).fault


def test_a_special_token_that_a_constraint_spells_is_text() -> None:
    constraint = Constraint(choice={"texts": ["<|im_end|>"]})
    output: list[int] = []
    while allowed := allowed_after(constraint, (2,), output):
        (token_id,) = allowed
        if token_id == 2:
            break
        output.append(token_id)
    assert FAST.decode(output) == "<|im_end|>" and 2 not in output


@pytest.mark.parametrize("eos_ids", [(2,), (2, 3)])
def test_a_grammar_may_end_with_an_eos_that_it_names(eos_ids: tuple[int, ...]) -> None:
    constraint, (a,) = Constraint(lark='start: "a" <[2]>'), FAST.encode("a").ids
    assert allowed_after(constraint, eos_ids, [a]) == {2}
    assert GRAMMARS.num_allowed(GRAMMARS.compile(constraint), [a, 2], eos_ids) == 2
    rule = rule_of(constraint, eos_ids, [])
    assert rule.allowed_nodes([], [a, 2, a], [-1, 0, 1]) == [0, 1]
    rule.commit([a, 2])
    assert not rule.fault and not rule.applies_after(2)


def test_no_answer_goes_on_behind_an_eos_that_a_grammar_names() -> None:
    constraint, (a, b) = Constraint(lark='start: "a" (<[2]> "b" | "b")'), [*FAST.encode("a").ids, *FAST.encode("b").ids]
    assert allowed_after(constraint, (2,), [a]) == {b}
