"""One sequence's rules, applied to its rows. The owner reports committed ids; logits are not known here."""

from __future__ import annotations

from collections.abc import Sequence

from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.logits_rules import BlockPath, LogitsRule, follow_rules, make_rules
from betoken.engine.sampling import SamplingParams


class SequenceRules:
    """The rules of one sequence, in the order they apply: the grammar's, the parameters', others."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        grammar: GrammarRule | None = None,
        extra: Sequence[LogitsRule] = (),
    ) -> None:
        """Args:
        output_ids: the committed ids; the owner appends to them and reports it with `commit`.
        grammar: has followed `output_ids` already.
        """
        self._prompt_ids = prompt_ids
        self._output_ids = output_ids
        self._grammar = grammar
        self._rules = (*([grammar] if grammar is not None else []), *make_rules(params), *extra)

    def branched(self, params: SamplingParams, output_ids: Sequence[int], num_ahead: int) -> SequenceRules:
        """Rules of a copy of the sequence whose output has `num_ahead` more ids. `params`: see `__init__`."""
        grammar = self._grammar.copy() if self._grammar is not None else None
        if grammar is not None:
            grammar.commit(output_ids[len(output_ids) - num_ahead :])
        return SequenceRules(params, self._prompt_ids, output_ids, grammar)

    @property
    def is_empty(self) -> bool:
        """Whether no rule adjusts anything."""
        return not self._rules

    @property
    def num_committed(self) -> int:
        """Output ids that are committed."""
        return len(self._output_ids)

    @property
    def fault(self) -> str:
        """Why nothing may follow the committed ids; empty while something may."""
        return self._grammar.fault if self._grammar is not None else ""

    @property
    def is_inconsistent(self) -> bool:
        """Whether the fault is the grammar's own: it refused an id that its mask had allowed."""
        return self._grammar is not None and self._grammar.is_inconsistent

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    def commit(self, ids: Sequence[int]) -> None:
        """Follow ids that were appended to the output."""
        for rule in self._rules:
            rule.commit(ids)

    def rows(
        self, draft_ids: Sequence[int], parents: Sequence[int] | None = None, ahead_ids: Sequence[int] = ()
    ) -> BlockPath | None:
        """The adjustments of the len(draft_ids) + 1 rows of a block; None if no rule adjusts anything.

        Args:
            draft_ids: row i + 1 follows draft id i.
            parents: of each draft id, the index of the one it follows, -1 for what is before the block; None for a
                chain.
            ahead_ids: between the committed ids and the block: what a drafter has drafted so far.
        """
        if not self._rules:
            return None
        output_ids = [*self._output_ids, *ahead_ids] if ahead_ids else self._output_ids
        rules = [rule for rule in self._rules if rule.applies_after(len(output_ids))]
        return follow_rules(rules, self._prompt_ids, output_ids, draft_ids, parents) if rules else None

    def forced_ids(self, num_ids: int) -> list[int]:
        """At most so many ids that follow the committed ones by necessity: the grammar allows no other."""
        return self._grammar.forced_ids(self._output_ids, num_ids) if self._grammar is not None else []

    def allowed_nodes(self, draft_ids: Sequence[int], parents: Sequence[int] | None = None) -> list[int]:
        """The drafts, by index, that the grammar allows with all that they follow; the others cannot be accepted."""
        if self._grammar is None:
            return list(range(len(draft_ids)))
        if parents is None:
            parents = range(-1, len(draft_ids) - 1)
        return self._grammar.allowed_nodes(self._output_ids, draft_ids, parents)
