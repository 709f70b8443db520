"""A strict draft worker without a model: its acceptance rate is configurable, and faults are injected on demand.

It drafts from the expected continuation of a sequence.

Everything a router must not do is noted in `violations`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import grpc

from betoken.common.names import PREDICTION
from betoken.testing.fake_model import FakeCursor, FakeModel
from betoken.testing.fake_worker import LOOPBACK, FakeLink, FakeWorker
from betoken.v1.draft_pb2 import DraftedBlock, DraftLinkRequest, DraftLinkResponse, DraftRequest
from betoken.v1.draft_pb2_grpc import add_DraftServiceServicer_to_server
from betoken.v1.types_pb2 import (
    Drain,
    LinkError,
    Load,
    OpenSequence,
    WorkerHello,
)

_KNOWN_SETTINGS = {"max_ngram"}


def draft_hello(model: FakeModel, tokenizer_hash: str, **fields: Any) -> WorkerHello:
    """A handshake for a fake draft worker; `fields` replace the defaults."""
    hello = WorkerHello(
        protocol_version=1,
        role="draft",
        model_id="fake-draft",
        dtype="float32",
        weights_fingerprint="d" * 64,
        tokenizer_hash=tokenizer_hash,
        vocab_size=model.vocab_size,
        max_context=2048,
        max_sequences=256,
        tensor_parallel_degree=1,
        drafters=["model", "ngram"],
        max_draft_tokens=16,
    )
    for name, value in fields.items():
        setattr(hello, name, value)
    return hello


@dataclass(slots=True)
class _Sequence:
    entry: OpenSequence
    cursor: FakeCursor
    length: int
    last_id: int
    num_missing_kv: int
    request: DraftRequest | None = None
    arrived_ns: int = 0


@dataclass(slots=True)
class DraftFaults:
    """Its faults, until changed."""

    is_silent: bool = False
    """Answers no request."""
    wrong_base: bool = False
    wrong_next_id: bool = False
    bad_ids: bool = False
    """The second id of each block is outside the vocabulary."""
    too_many: bool = False
    """Three ids more than wanted."""
    is_empty: bool = False
    """Has no guesses."""
    empty_answers: int = 0
    """So many times more."""
    no_sources: bool = False
    bad_sources: bool = False
    """Sources that no version knows."""
    bad_times: bool = False
    """Invalid times."""
    is_tree: bool = False
    """All nodes are children of the root."""
    error_code: int = 0
    """google.rpc.Code given to every request; 0 = none."""
    refuses_settings: bool = False
    """Knows none of a drafter's settings."""


class FakeDraftWorker(FakeWorker):
    """Guesses what `model` says, rightly with probability `agreement` per token."""

    role = "draft"

    def __init__(
        self,
        model: FakeModel,
        hello: WorkerHello,
        agreement: float = 0.8,
        step_s: float = 0.0,
        host: str = LOOPBACK,
    ) -> None:
        super().__init__(hello, step_s, host)
        self.model = model
        self.agreement = agreement
        self.faults = DraftFaults()
        self.makes_trees = False
        """Whether it answers with trees if the request allows them."""
        self.heeds_terms = False
        """Whether it drafts up to the limit of the terms, and nothing if a token costs more than it yields."""
        self.prefill_rows = 0
        """Ids of a sequence computed in a step before its first draft; 0 = all at once."""
        self.num_blocks = 0
        """Blocks answered."""
        self.requests: list[DraftRequest] = []
        """The last ones."""
        self._errors: list[tuple[FakeLink, LinkError]] = []

    def _register(self, server: grpc.aio.Server) -> None:
        add_DraftServiceServicer_to_server(self, server)

    def _hello_frame(self) -> DraftLinkResponse:
        return DraftLinkResponse(hello=self.hello, load=Load())

    def take(self, link: FakeLink, frame: DraftLinkRequest) -> None:
        now_ns = time.perf_counter_ns()
        for entry in frame.opens:
            self.check_open(entry)
            unknown = set(entry.drafter.settings) - (set() if self.faults.refuses_settings else _KNOWN_SETTINGS)
            if unknown or (entry.drafter.name and entry.drafter.name not in self.hello.drafters):
                self._refuse(link, entry.sequence_id, grpc.StatusCode.INVALID_ARGUMENT.value[0], f"unknown: {unknown}")
                continue
            length = len(entry.prompt_ids) + len(entry.committed_ids)
            link.sequences[entry.sequence_id] = _Sequence(
                entry, self.model.cursor(entry), length, (entry.committed_ids or entry.prompt_ids)[-1], length
            )
        for commit in frame.commits:
            sequence = link.sequences.get(commit.sequence_id)
            if sequence is None:
                continue
            if commit.base_length != sequence.length:
                self.violations.append(f"commit at {commit.base_length}, sequence is {sequence.length} long")
            sequence.cursor.push_all(commit.ids)
            sequence.length += len(commit.ids)
            sequence.last_id = commit.ids[-1]
        for request in frame.requests:
            sequence = link.sequences.get(request.sequence_id)
            if sequence is None:
                continue
            if sequence.request is not None:
                self.violations.append("a request while another is unanswered")
            if (request.base_length, request.next_id) != (sequence.length, sequence.last_id):
                self.violations.append(f"a request for {request.base_length} and {request.next_id}")
            if not 1 <= request.num_tokens <= self.hello.max_draft_tokens:
                self.violations.append(f"{request.num_tokens} tokens asked for")
            terms = request.terms
            if request.HasField("terms") and not request.num_tokens <= terms.max_tokens <= self.hello.max_draft_tokens:
                self.violations.append(f"terms of {terms.max_tokens} tokens")
            sequence.request, sequence.arrived_ns = request, now_ns
            self.requests = [*self.requests[-63:], request]
        for closing in frame.closes:
            self.close(link, closing.sequence_id)
        self.work.set()

    def has_work(self) -> bool:
        return (
            bool(self._errors)
            or self._says_drain
            or any(
                sequence.request is not None and not self.faults.is_silent
                for link in self.links
                for sequence in link.sequences.values()
            )
        )

    def step(self, started_ns: int) -> list[tuple[FakeLink, DraftLinkResponse]]:
        frames = []
        for link in self.links:
            frame = DraftLinkResponse(load=Load(running=self.num_open))
            frame.errors.extend(entry for owner, entry in self._errors if owner is link)
            if self._says_drain:
                frame.drain.CopyFrom(Drain(reason="fake drain"))
            for sequence_id, sequence in list(link.sequences.items()):
                if sequence.request is not None and not self.faults.is_silent:
                    self._answer(frame, link, sequence_id, sequence, started_ns)
            frames.append((link, frame))
        self._errors.clear()
        self._says_drain = False
        forward_ns = time.perf_counter_ns() - started_ns
        for _, frame in frames:
            for block in frame.blocks:
                block.forward_ns = (1 << 64) - 1 if self.faults.bad_times else forward_ns
        return frames

    def _answer(
        self, frame: DraftLinkResponse, link: FakeLink, sequence_id: int, sequence: _Sequence, started_ns: int
    ) -> None:
        assert sequence.request is not None
        faults, request = self.faults, sequence.request
        num_tokens = request.num_tokens
        if self.heeds_terms and request.HasField("terms"):
            num_tokens = request.terms.max_tokens if request.terms.row_price < 1.0 else 0
        if faults.error_code:
            frame.errors.append(LinkError(sequence_id=sequence_id, code=faults.error_code, message="fake error"))
            link.sequences.pop(sequence_id)
            return
        if self.prefill_rows and sequence.num_missing_kv > self.prefill_rows:
            sequence.num_missing_kv -= self.prefill_rows
            frame.pending_ids.append(sequence_id)
            return
        if self.makes_trees and request.takes_trees:
            frame.blocks.append(self._tree(request, sequence, num_tokens))
            sequence.request = None
            return
        sequence.request = None
        ids: list[int] = []
        cursor = sequence.cursor.copy()
        is_empty, faults.empty_answers = faults.is_empty or faults.empty_answers > 0, max(0, faults.empty_answers - 1)
        for _ in range(0 if is_empty else num_tokens + 3 * faults.too_many):
            ids.append(cursor.guess(self.agreement))
            cursor.push(ids[-1])
        if faults.bad_ids and len(ids) > 1:
            ids[1] = self.model.vocab_size + 3
        source = sequence.entry.drafter.name or self.hello.drafters[0]
        if predicted := sequence.entry.predicted_ids[sequence.length - len(sequence.entry.prompt_ids) :][:num_tokens]:
            ids, source = list(predicted), PREDICTION
        if faults.bad_sources:
            source = "s" * 99
        frame.blocks.append(
            DraftedBlock(
                sequence_id=sequence_id,
                base_length=sequence.length + faults.wrong_base,
                next_id=request.next_id + faults.wrong_next_id,
                ids=ids,
                parents=[-1] * len(ids) if faults.is_tree else (),
                sources=() if faults.no_sources else [source],
                queue_ns=max(0, started_ns - sequence.arrived_ns),
                num_forwards=len(ids),
            )
        )
        self.num_blocks += 1

    def _tree(self, request: DraftRequest, sequence: _Sequence, num_tokens: int) -> DraftedBlock:
        """Two children a level, a wrong one of the source n-gram before the guess of the source model."""
        block = DraftedBlock(sequence_id=request.sequence_id, base_length=request.base_length, next_id=request.next_id)
        cursor, parent = sequence.cursor.copy(), -1
        while len(block.ids) + 2 <= num_tokens:
            guess = cursor.guess(self.agreement)
            block.ids.extend([(guess + 2) % self.model.vocab_size, guess])
            block.parents.extend([parent, parent])
            block.sources.extend(["ngram", "model"])
            cursor.push(guess)
            parent = len(block.ids) - 1
        self.num_blocks += 1
        return block

    def _refuse(self, link: FakeLink, sequence_id: int, code: int, message: str) -> None:
        self._errors.append((link, LinkError(sequence_id=sequence_id, code=code, message=message)))
