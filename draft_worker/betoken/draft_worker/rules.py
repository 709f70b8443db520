"""Makes the rules that models draft under. A constraint that cannot be kept here costs drafts, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from betoken.common.errors import BetokenError
from betoken.draft_worker.handler import GrammarOf
from betoken.drafters.drafter import DraftSequence
from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import OpenSequence

RulesOf: TypeAlias = Callable[[DraftSequence, GrammarRule | None], SequenceRules]
"""Makes the rules of a sequence, with what its constraint allows."""

logger = logging.getLogger(__name__)


def grammar_maker(tokenizer_json: str) -> GrammarOf | None:
    """Makes the grammars of constraints; `tokenizer_json`: the models' tokenizer, empty without one."""
    if not tokenizer_json:
        return None
    try:
        grammars = Grammars(tokenizer_json)
    except BetokenError as error:
        logger.warning("models draft without a request's constraint: %s", error)
        return None

    def grammar_of(entry: OpenSequence) -> GrammarRule | None:
        try:
            matcher = grammars.compile(entry.constraint)
        except BetokenError as error:  # the target's worker reports it to the client concerned
            logger.info("a sequence is drafted without its constraint: %s", error)
            return None
        return GrammarRule(matcher, grammars.vocab_size, entry.eos_token_ids, entry.committed_ids)

    return grammar_of


def rules_of(sequence: DraftSequence, grammar: GrammarRule | None) -> SequenceRules:
    """The rules of a sequence, which follow its output from here on."""
    moving = grammar.copy() if grammar is not None else None
    return SequenceRules(sequence.params, sequence.prompt_ids, sequence.output_ids, moving)
