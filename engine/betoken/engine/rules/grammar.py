"""A grammar as one more rule: which ids may follow the output, for every row of a block.

A pure function of the output ids. Committed ids alone move its matcher; a block's drafts are read and taken back. Its
maker knows schemas and tokenizers; this does not.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from betoken.engine.rules.logits_rules import BlockPath, LogitsRule

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FREE_MASK_S, _MASK_S = 0.5, 0.01
"""CPU time of a sequence's masks: at once, and further for every mask. Usual masks take 0.1 to 2 ms."""

Visit = Callable[[int, bool], None]
"""Gets a node (-1 = what is before the drafts), and whether the answer has ended with it."""


class GrammarRule(LogitsRule):
    """Masks what the grammar refuses. An id of `eos_token_ids` is allowed exactly when the grammar may end, or when
    the grammar names it and ends with it."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: Collection[int],
        output_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Args:
        matcher: at the grammar's beginning; shared, and never moved.
        vocab_size: ids that the matcher knows.
        eos_token_ids: at least one.
        output_ids: committed so far.
        clock: CPU time of the calling thread, seconds.
        """
        self._clock = clock
        self._num_masks, self._masks_s = 0, 0.0
        self._beginning = matcher
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_token_ids)
        self._num_words = -(-max(vocab_size, *(token_id + 1 for token_id in self._eos_ids)) // 32)
        self._eos_mask = np.zeros(self._num_words, dtype=np.int32)
        for token_id in self._eos_ids:
            self._eos_mask[token_id >> 5] |= np.uint32(1 << (token_id & 31)).view(np.int32)
        is_known = np.arange(32 * self._num_words) < vocab_size
        self._text_mask = np.packbits(is_known, bitorder="little").view(np.int32) & ~self._eos_mask
        """Ids that may go on with an answer."""
        self.fault = ""
        """Why nothing may follow the committed ids, in the library's words; empty while something may."""
        self.is_inconsistent = False
        """Whether the grammar refused an id that its mask had allowed, which no request can cause."""
        self._matcher = matcher.deep_copy()
        self._num_committed = 0
        self._has_ended = False
        """Whether a committed id ended the answer."""
        self.commit(output_ids)

    def copy(self) -> GrammarRule:
        """A copy of the rule with an independent position."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def applies_after(self, num_outputs: int) -> bool:
        """Text after the end of an answer is ignored."""
        return not self._has_ended

    def commit(self, ids: Sequence[int]) -> None:
        """Follow committed ids; ids after the answer's end are ignored."""
        for token_id in ids if not (self._has_ended or self.fault) else ():
            if token_id in self._eos_ids:
                self._has_ended = True
                break
            if not self._read(token_id):
                self.is_inconsistent = not self._matcher.is_error()
                self.fault = self._matcher.get_error() or f"id {token_id} is not allowed at its position"
                break
        self._num_committed += len(ids)

    def adjust(self, path: BlockPath) -> None:
        """Masks every row whose ids the grammar allows; the other rows choose no token."""

        if self.fault:
            path.allow(0, np.zeros(self._num_words, dtype=np.int32))
            return
        ahead = path.output_ids[self._num_committed :]
        is_stuck = False

        def mask(node: int, has_ended: bool) -> None:
            nonlocal is_stuck
            if not has_ended:
                allowed = self._mask()
                path.allow(node + 1, allowed)
                is_stuck |= node < 0 and not ahead and not allowed.any()

        self._walk(ahead, path.draft_ids, path.parents, mask)
        if is_stuck and not self.fault:
            self.fault = self._matcher.get_error() or "no token is allowed here"
        if self._matcher.is_error():  # at a limit of the library, which leaves its matcher unusable
            self._restore(path.output_ids)

    def allowed_nodes(self, output_ids: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Nodes whose whole path the grammar allows, ascending. `output_ids`: all that is committed."""
        nodes: list[int] = []
        if self.fault or self._has_ended:
            return list(range(len(draft_ids)))
        self._walk((), draft_ids, parents, lambda node, _: nodes.append(node))
        if self._matcher.is_error():
            self._restore(output_ids)
        return sorted(nodes)[1:]

    def forced_ids(self, output_ids: Sequence[int], num_ids: int) -> list[int]:
        """At most so many ids that have to come next, one after another, the end excluded: that comes with the forward
        which verifies them. `output_ids`: all that is committed."""
        ids: list[int] = []
        if self.fault or self._has_ended:
            return ids
        while len(ids) < num_ids and (forced := _only_id(self._mask())) is not None:
            if forced in self._eos_ids or not self._read(forced):
                break
            ids.append(forced)
        if self._matcher.is_error():
            self._restore(output_ids)
        else:
            self._matcher.rollback(len(ids))
        return ids

    def _walk(self, ahead: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int], visit: Visit) -> None:
        """Visit the nodes that the grammar allows, depth first, with the matcher standing at each; then take all back.

        `ahead`: ids after the committed ones and before the block. An error of the matcher ends the walk.
        """
        children: list[list[int]] = [[] for _ in range(len(draft_ids) + 1)]
        for child, parent in enumerate(parents):
            children[parent + 1].append(child)
        num_read = 0
        for token_id in ahead:
            if token_id in self._eos_ids or not self._read(token_id):
                break
            num_read += 1
        else:
            visit(-1, False)
            trail = [iter(children[0])]
            while trail and not self._matcher.is_error():
                node = next(trail[-1], None)
                if node is None:
                    trail.pop()
                    if trail:
                        self._matcher.rollback(1)
                elif draft_ids[node] in self._eos_ids:
                    if self._may_end(draft_ids[node]):
                        visit(node, True)
                elif self._read(draft_ids[node]):
                    visit(node, False)
                    trail.append(iter(children[node + 1]))
        if not self._matcher.is_error():
            self._matcher.rollback(num_read)

    def _read(self, token_id: int) -> bool:
        """Whether the grammar allows the id next; then the matcher is behind it."""
        return 0 <= token_id < self._vocab_size and self._matcher.try_consume_tokens([token_id]) == 1

    def _mask(self) -> NDArray[np.int32]:
        """[words] what may follow; nothing after an error."""
        mask = np.zeros(self._num_words, dtype=np.int32)
        if self.fault:
            return mask
        started_s = self._clock()
        known = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._count_mask(self._clock() - started_s)
        if self._matcher.is_error():
            return mask
        num_words = min(len(known), self._num_words)  # the library rounds its masks up
        mask[:num_words] = known[:num_words]
        named_ids = [token_id for token_id in self._eos_ids if mask[token_id >> 5] >> (token_id & 31) & 1]
        mask &= self._text_mask
        if self._matcher.is_accepting():
            mask |= self._eos_mask
            return mask
        for token_id in filter(self._may_end, named_ids):
            mask[token_id >> 5] |= np.uint32(1 << (token_id & 31)).view(np.int32)
        return mask

    def _count_mask(self, mask_s: float) -> None:
        """Keep the masks of a sequence within their CPU time, so that others of the batch do not wait for them."""
        self._num_masks, self._masks_s = self._num_masks + 1, self._masks_s + mask_s
        limit_s = _FREE_MASK_S + _MASK_S * self._num_masks
        if self._masks_s > limit_s:
            limit = f"must take at most {_MASK_S * 1000:g} ms of CPU time a token, after {_FREE_MASK_S:g} s at once"
            self.fault = f"{limit}; {self._num_masks} masks took {self._masks_s:.1f} s"

    def _may_end(self, token_id: int) -> bool:
        """Whether the answer may end with this EOS id: the grammar is complete, or is with the id that it names."""
        if self._matcher.is_accepting():
            return True
        if not self._read(token_id):
            return False
        is_complete = bool(self._matcher.is_accepting())
        self._matcher.rollback(1)
        return is_complete

    def _restore(self, output_ids: Sequence[int]) -> None:
        """A fresh matcher behind the committed ids."""
        self._matcher = self._beginning.deep_copy()
        for token_id in output_ids[: self._num_committed]:
            self._read(token_id)


def _only_id(mask: NDArray[np.int32]) -> int | None:
    """The only id that a mask allows; None if it allows none or several."""
    (words,) = np.nonzero(mask)
    bits = int(mask[words[0]]) & 0xFFFFFFFF if len(words) == 1 else 0
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits and not bits & (bits - 1) else None
