"""JSON constraints of chats with a thinking model: a free thought, then the constrained answer."""

import numpy as np
import pytest

from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampling import SamplingParams
from betoken.router.text.thought import thought_first
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import Constraint
from tests.router.harness import byte_tokenizer_json, with_special_tokens

EOS = 0
SCHEMA = Constraint(json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
TEXTS = {False: byte_tokenizer_json(), True: with_special_tokens(byte_tokenizer_json(), "<think>", "</think>")}
GRAMMARS = {is_special: Grammars(text) for is_special, text in TEXTS.items()}
ANSWER = '{"a": 1}'


class Thinking:
    """A thinking model's tokenizer, whose marks are special tokens or text."""

    def __init__(self, is_special: bool) -> None:
        self.tokenizer = Tokenizer(TEXTS[is_special], {}, "{{ messages }}<think>", "thinking")
        self.grammars = GRAMMARS[is_special]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def takes(self, constraint: Constraint, prompt: str, text: str) -> bool:
        whole = thought_first(constraint, self.ids(prompt), self.tokenizer)
        ids = [*self.ids(text), EOS]
        return self.grammars.num_allowed(self.grammars.compile(whole), ids, (EOS,)) == len(ids)


@pytest.fixture(params=[False, True], ids=["text", "special"])
def thinking(request: pytest.FixtureRequest) -> Thinking:
    return Thinking(request.param)


@pytest.mark.parametrize("thought", ["", "hm", 'I {"b": 2} < / </thin\n\nü', "x" * 500])
def test_a_json_answer_follows_a_free_thought_that_the_prompt_began(thinking: Thinking, thought: str) -> None:
    for space in ("", "\n", "\n\n"):
        assert thinking.takes(SCHEMA, "u: <think>\n", f"{thought}</think>{space}{ANSWER}")
    assert not thinking.takes(SCHEMA, "u: <think>\n", ANSWER)
    assert not thinking.takes(SCHEMA, "u: <think>\n", f"{thought}</think>no")
    assert not thinking.takes(SCHEMA, "u: <think>\n", f"{thought}</think>{ANSWER} and")


def test_a_json_answer_may_begin_with_a_thought_or_not(thinking: Thinking) -> None:
    for constraint in (SCHEMA, Constraint(json_object=True)):
        assert thinking.takes(constraint, "u: ", ANSWER)
        assert thinking.takes(constraint, "u: ", f"<think>\nso\n</think>\n\n{ANSWER}")
        assert not thinking.takes(constraint, "u: ", f"so {ANSWER}")


def test_a_json_answer_has_no_thought_if_the_prompt_ended_it(thinking: Thinking) -> None:
    closed = "u: <think>\n\n</think>\n\n"
    assert thinking.takes(SCHEMA, closed, ANSWER) and not thinking.takes(SCHEMA, closed, f"<think>a</think>{ANSWER}")


def test_other_constraints_and_models_without_thoughts_stay_as_they_are(thinking: Thinking) -> None:
    regex = Constraint(regex="a")
    assert thought_first(regex, thinking.ids("u: <think>"), thinking.tokenizer) is regex
    plain = Tokenizer(TEXTS[False], {}, "{{ messages }}", "plain")
    assert thought_first(SCHEMA, plain.encode("u: "), plain) is SCHEMA


def test_one_block_may_hold_the_thoughts_end_and_the_json_answer(thinking: Thinking) -> None:
    whole = thought_first(SCHEMA, thinking.ids("u: <think>\n"), thinking.tokenizer)
    matcher, size = thinking.grammars.compile(whole), thinking.grammars.vocab_size
    output, block = thinking.ids("so"), thinking.ids(' it is</think>{"a')
    params = SamplingParams(eos_token_ids=(EOS,))
    together = SequenceRules(params, [1], output, GrammarRule(matcher, size, (EOS,), output)).rows(block)
    assert together is not None and together.allowed is not None
    for row in range(len(block) + 1):
        ids = [*output, *block[:row]]
        alone = SequenceRules(params, [1], ids, GrammarRule(matcher, size, (EOS,), ids)).rows([])
        assert alone is not None and alone.allowed is not None
        assert np.array_equal(together.allowed[row], alone.allowed[0])
