"""The file that keeps a memory of earlier texts over restarts: a header line, the ids, and a SHA-256 of both.

A file of other content is rejected, so that it is never overwritten. A damaged file and one of another version or
tokenizer are replaced, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.suffix.text_store import MAX_ID, Ids, TextStore

logger = logging.getLogger(__name__)
_MAGIC = b"betoken suffix memory 1\n"
_KIND = b"betoken suffix memory "
_HASH_BYTES = 32
_PERIOD_S = 60.0
"""Shortest time between two writes while the worker serves."""


class MemoryFile:
    """One memory's file."""

    def __init__(self, path: Path, tokenizer_hash: str) -> None:
        """`tokenizer_hash`: of the tokenizer whose ids the texts hold; empty = not known."""
        self._path = path
        self._tokenizer_hash = tokenizer_hash
        self._written_s = time.monotonic()
        self._writer: threading.Thread | None = None

    def read(self) -> Iterator[tuple[bytes, Ids]]:
        """Yield owners and documents, owner by owner, in order of arrival; nothing without a usable file.

        Raises:
            FailedPreconditionError: the file is not a memory, or cannot be read or written.
        """
        try:
            data = self._path.read_bytes() if self._path.exists() else b""
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab"):
                pass
        except OSError as error:
            raise FailedPreconditionError(f"--suffix-memory: file = {self._path}: {error.strerror or error}") from error
        if data and not data.startswith(_KIND):
            raise FailedPreconditionError(
                f"--suffix-memory: file = {self._path}: is not a memory of the drafter `suffix`"
            )
        if not data:
            return
        try:
            yield from self._documents(data)
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s: the memory starts empty: %s", self._path, error)

    def write_if_due(self, store: TextStore) -> None:
        """Write the store's texts on a thread if the last write was some time ago."""
        is_writing = self._writer is not None and self._writer.is_alive()
        if time.monotonic() - self._written_s >= _PERIOD_S and not is_writing:
            self._written_s = time.monotonic()
            self._writer = threading.Thread(target=self._write, args=(self._contents(store),), name="suffix-file")
            self._writer.start()

    def write(self, store: TextStore) -> None:
        """Write the store's texts now."""
        if self._writer is not None:
            self._writer.join()
        self._write(self._contents(store))

    def _contents(self, store: TextStore) -> list[bytes]:
        documents = {name: list(store.documents(name)) for name in store.owners}
        owners = [[name.hex(), [len(ids) for ids in of]] for name, of in documents.items()]
        header = json.dumps({"tokenizer": self._tokenizer_hash, "owners": owners})
        texts = [ids.astype("<u4").tobytes() for of in documents.values() for ids in of]
        return [_MAGIC, header.encode() + b"\n", *texts]

    def _write(self, parts: list[bytes]) -> None:
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines([*parts, digest.digest()])
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._path)
        except OSError as error:
            logger.warning("%s: the memory is not written: %s", self._path, error)
            partial.unlink(missing_ok=True)

    def _documents(self, data: bytes) -> Iterator[tuple[bytes, Ids]]:
        """Raises:
        ValueError: the file is damaged, or of another version or tokenizer.
        """
        if not data.startswith(_MAGIC):
            raise ValueError("the file is of another version")
        if hashlib.sha256(data[:-_HASH_BYTES]).digest() != data[-_HASH_BYTES:]:
            raise ValueError("the file is damaged")
        end = data.index(b"\n", len(_MAGIC))
        header = json.loads(data[len(_MAGIC) : end])
        if header["tokenizer"] != self._tokenizer_hash:
            raise ValueError("the file is of another tokenizer")
        ids = np.frombuffer(data[end + 1 : -_HASH_BYTES], "<u4").astype(np.uint32)
        if (ids > MAX_ID).any():
            raise ValueError("the file holds what is not a token id")
        place = 0
        for name, lengths in header["owners"]:
            for length in lengths:
                yield bytes.fromhex(name), ids[place : place + length]
                place += length
