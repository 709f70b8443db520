"""CPU time of a grammar's masks: a sequence beyond its budget ends, whatever the load; usual ones never do."""

import itertools

import numpy as np

from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.engine.sampling import SamplingParams
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import Constraint
from tests.router.harness import byte_tokenizer_json

GRAMMARS = Grammars(byte_tokenizer_json())
(A,) = GRAMMARS._tokenizer.tokenize_str("a")
EOS = 0


class Clock:
    """A clock on which every mask takes `mask_s` seconds."""

    def __init__(self, mask_s: float) -> None:
        self._times = (index // 2 * 100.0 + index % 2 * mask_s for index in itertools.count())

    def __call__(self) -> float:
        return next(self._times)


def steps_of(mask_s: float, num_drafts: int) -> tuple[GrammarRule, int]:
    """The rule of an answer of up to 400 tokens, and the number of tokens until nothing was allowed."""
    matcher, output = GRAMMARS.compile(Constraint(regex="a*")), [A] * 0
    rule = GrammarRule(matcher, GRAMMARS.vocab_size, (EOS,), (), Clock(mask_s))
    rules = SequenceRules(SamplingParams(eos_token_ids=(EOS,)), [1], output, rule)
    while len(output) < 400:
        path = rules.rows([A] * num_drafts)
        assert path is not None and path.allowed is not None
        emitted = [A] * int(np.cumprod(path.allowed.any(axis=1)).sum())
        if not emitted:
            break
        output += emitted
        rules.commit(emitted)
    return rule, len(output)


def test_usual_grammar_masks_never_end_an_answer() -> None:
    for num_drafts in (0, 4):
        rule, num_tokens = steps_of(0.009, num_drafts)
        assert num_tokens == 400 and not rule.fault


def test_grammar_masks_beyond_their_cpu_time_end_the_sequence_with_the_limit() -> None:
    for num_drafts in (0, 4):
        rule, num_tokens = steps_of(0.1, num_drafts)
        assert num_tokens < 12 and "10 ms of CPU time a token" in rule.fault and not rule.is_inconsistent


def test_no_grammar_mask_is_computed_beyond_the_cpu_time() -> None:
    rule, _ = steps_of(2.0, 4)
    assert rule._num_masks == 1 and not rule.forced_ids([], 8)


def test_a_copy_of_a_grammar_counts_its_own_masks() -> None:
    rule = GrammarRule(GRAMMARS.compile(Constraint(regex="a*")), GRAMMARS.vocab_size, (EOS,), (), Clock(0.2))
    for _ in range(4):
        other = rule.copy()
        SequenceRules(SamplingParams(eos_token_ids=(EOS,)), [1], [], other).rows([])
        assert not other.fault and rule._num_masks == 0
