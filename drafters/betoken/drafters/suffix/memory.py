"""Texts of finished sequences by tenant, and the operator's corpus, as one memory to draft from."""

from __future__ import annotations

from collections.abc import Sequence

from betoken.common.economy.memory_counts import MemoryCounts
from betoken.drafters.suffix.memory_file import MemoryFile
from betoken.drafters.suffix.text_store import BYTES_PER_TOKEN, Match, TextStore

_EVERYONE = b"everyone"
CORPUS = b"corpus"
"""Owner of the documents of the corpus."""


class SuffixMemory:
    """A bounded memory; the text of a tenant is found by that tenant alone unless tenants share it."""

    def __init__(
        self,
        max_bytes: int,
        shares_tenants: bool = False,
        corpus: TextStore | None = None,
        file: MemoryFile | None = None,
    ) -> None:
        """Args:
        corpus: documents that every sequence may draft from; they are never evicted.
        file: keeps the texts over restarts; they are read at once.

        Raises:
            FailedPreconditionError: the file cannot be used.
        """
        self.store = TextStore(max_bytes // BYTES_PER_TOKEN)
        self._shares_tenants = shares_tenants
        self._corpus = corpus
        self._file = file
        self._num_hits = 0
        for name, ids in file.read() if file is not None else ():
            if shares_tenants or name != _EVERYONE:  # texts that were shared have no tenant any more
                self.store.add(self._owner(name), ids)

    @property
    def counts(self) -> MemoryCounts:
        """Documents and tokens that it holds, and drafts and evicted documents since the start; without the corpus."""
        store = self.store
        return MemoryCounts(store.num_documents, store.num_tokens, self._num_hits, store.num_evicted)

    def remember(self, tenant: bytes, ids: Sequence[int], num_known: int) -> None:
        """Add a finished text of a tenant; of an unknown tenant (empty) nothing is kept unless tenants share texts.

        `num_known`: see `TextStore.add`.
        """
        if owner := self._owner(tenant):
            self.store.add(owner, ids, num_known)
            if self._file is not None:
                self._file.write_if_due(self.store)

    def write(self) -> None:
        """Write the texts to the file, if there is one."""
        if self._file is not None:
            self._file.write(self.store)

    def find(self, tenant: bytes, ids: Sequence[int], depth: int, *, corpus_only: bool = False) -> Match | None:
        """The longest match of the end of a text, the tenant's own if it is as long as the corpus's."""
        owner = self._owner(tenant)
        own = self.store.find(owner, ids, depth) if owner and not corpus_only else None
        found = self._corpus.find(CORPUS, ids, depth) if self._corpus is not None else None
        if own is None or (found is not None and found.length > own.length):
            return found
        return own

    def hit(self) -> None:
        """Count a draft from memory."""
        self._num_hits += 1

    def check_integrity(self) -> None:
        """See `TextStore.check_integrity`."""
        self.store.check_integrity()

    def _owner(self, tenant: bytes) -> bytes:
        return _EVERYONE if self._shares_tenants else tenant
