"""Makes the rules that models draft under. A constraint that cannot be kept here costs drafts, and nothing else."""

import logging

from betoken.common.errors import BetokenError
from betoken.draft_worker.handler import RulesOf
from betoken.drafters.drafter import DraftSequence
from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.sequence_rules import SequenceRules
from betoken.rpc.constraints import Grammars
from betoken.v1.types_pb2 import OpenSequence

logger = logging.getLogger(__name__)


def rules_maker(tokenizer_json: str) -> RulesOf:
    """Makes a sequence's rules, constraint included; `tokenizer_json`: that of the models, empty without one."""
    grammars: Grammars | None = None
    if tokenizer_json:
        try:
            grammars = Grammars(tokenizer_json)
        except BetokenError as error:
            logger.warning("models draft without a request's constraint: %s", error)

    def rules_of(sequence: DraftSequence, entry: OpenSequence) -> SequenceRules:
        grammar = None
        if grammars is not None and entry.HasField("constraint"):
            try:
                matcher = grammars.compile(entry.constraint)
                grammar = GrammarRule(matcher, grammars.vocab_size, entry.eos_token_ids, entry.committed_ids)
            except BetokenError as error:  # the target's worker reports it to the client concerned
                logger.info("a sequence is drafted without its constraint: %s", error)
        return SequenceRules(sequence.params, sequence.prompt_ids, sequence.output_ids, grammar)

    return rules_of
