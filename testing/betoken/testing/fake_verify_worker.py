"""A strict verify worker without a model: real protocol, batched answers, and faults on demand.

Everything a router must not do is noted in `violations`.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import grpc

from betoken.testing.fake_model import FakeCursor, FakeModel
from betoken.testing.fake_worker import LOOPBACK, FakeLink, FakeWorker
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    Drain,
    LinkError,
    Load,
    OpenSequence,
    TokenLogprobs,
    WorkerHello,
)
from betoken.v1.verify_pb2 import (
    DraftBlock,
    PromptLogprobs,
    Stale,
    VerificationResult,
    VerifyLinkRequest,
    VerifyLinkResponse,
)
from betoken.v1.verify_pb2_grpc import add_VerifyServiceServicer_to_server

_TOTAL_PAGES = 4096


def verify_hello(model: FakeModel, tokenizer_hash: str, **fields: Any) -> WorkerHello:
    """A handshake for a fake verify worker; `fields` replace the defaults."""
    hello = WorkerHello(
        protocol_version=1,
        role="verify",
        model_id="fake",
        dtype="float32",
        weights_fingerprint="f" * 64,
        tokenizer_hash=tokenizer_hash,
        vocab_size=model.vocab_size,
        max_context=2048,
        max_sequences=256,
        verification_modes=[VERIFICATION_MODE_COUPLED],
        tensor_parallel_degree=1,
        max_draft_tokens=16,
        eos_token_ids=[model.eos_token_id],
        page_size=16,
    )
    hello.default_sampling.temperature = 0.0
    for name, value in fields.items():
        setattr(hello, name, value)
    return hello


@dataclass(slots=True)
class _Sequence:
    entry: OpenSequence
    cursor: FakeCursor
    length: int
    num_missing_kv: int
    next_to_send: int
    """Position of the prompt token whose logprobs are sent next."""
    granted_length: int = 0
    blocks: deque[tuple[DraftBlock, int]] = field(default_factory=deque)  # with arrival, perf_counter_ns


@dataclass(slots=True)
class VerifyFaults:
    """Counters of answers still to be spoilt, counted down as they are."""

    stale: int = 0
    """Blocks answered `stale`."""
    bad_next_id: int = 0
    """Verification results with an id outside the vocabulary."""
    bad_base: int = 0
    """Verification results for another length."""
    bad_accepted: int = 0
    """Verification results that accept more than was proposed."""
    bad_path: int = 0
    """Verification results on trees without their path, where something was accepted."""
    no_logprobs: int = 0
    """Verification results without the logprobs that were asked for."""
    bad_logprobs: int = 0
    """Verification results whose first logprob is NaN or infinite."""
    bad_top_logprobs: int = 0
    """Verification results with an id among the likeliest that has no logprob."""
    bad_prompt_position: int = 0
    """Logprobs of a prompt that leave one out."""
    bad_prompt_logprobs: int = 0
    """Logprobs of a prompt whose first is NaN."""
    bad_times: int = 0
    """Verification results whose times are impossible."""
    error_code: int = 0
    """google.rpc.Code given to the next open or block; 0 = none."""
    open_error_code: int = 0
    """google.rpc.Code given to every open; 0 = none."""


class FakeVerifyWorker(FakeWorker):
    """Says what `model` says."""

    role = "verify"

    def __init__(self, model: FakeModel, hello: WorkerHello, step_s: float = 0.0, host: str = LOOPBACK) -> None:
        super().__init__(hello, step_s, host)
        self.model = model
        self.faults = VerifyFaults()
        self.tokens_per_s, self.row_price = 0.0, 0.0
        """As its load says."""
        self.prefill_rows = 0
        """Committed ids of a sequence computed in a step before its first block; 0 = all at once."""
        self.num_blocks = 0
        """Drafted blocks verified."""
        self._errors: list[tuple[FakeLink, LinkError]] = []

    def _register(self, server: grpc.aio.Server) -> None:
        add_VerifyServiceServicer_to_server(self, server)

    def _hello_frame(self) -> VerifyLinkResponse:
        return VerifyLinkResponse(hello=self.hello, load=self._load())

    def take(self, link: FakeLink, frame: VerifyLinkRequest) -> None:
        now_ns = time.perf_counter_ns()
        for entry in frame.opens:
            self.check_open(entry)
            if self.faults.open_error_code:
                self._refuse(link, entry.sequence_id, self.faults.open_error_code)
                continue
            length = len(entry.prompt_ids) + len(entry.committed_ids)
            is_told = entry.sampling.HasField("prompt_logprobs")
            next_to_send = 1 + entry.num_prompt_logprobs_sent if is_told else len(entry.prompt_ids)
            cursor = self.model.cursor(entry)
            link.sequences[entry.sequence_id] = _Sequence(entry, cursor, length, length, next_to_send)
        for block in frame.blocks:
            sequence = link.sequences.get(block.sequence_id)
            if sequence is None:
                self._refuse(link, block.sequence_id, grpc.StatusCode.NOT_FOUND.value[0])
            else:
                self._check_block(sequence, block)
                sequence.blocks.append((block, now_ns))
        for closing in frame.closes:
            self.close(link, closing.sequence_id)
        self.work.set()

    def has_work(self) -> bool:
        if self._errors or self._says_drain:
            return True
        return any(
            sequence.blocks or self._is_granted(sequence) or self._has_pending_prompt_logprobs(sequence)
            for link in self.links
            for sequence in link.sequences.values()
        )

    def step(self, started_ns: int) -> list[tuple[FakeLink, VerifyLinkResponse]]:
        frames = []
        for link in self.links:
            frame = VerifyLinkResponse(load=self._load())
            frame.errors.extend(entry for owner, entry in self._errors if owner is link)
            if self._says_drain:
                frame.drain.CopyFrom(Drain(reason="fake drain"))
            for sequence_id, sequence in list(link.sequences.items()):
                self._answer(frame, link, sequence_id, sequence, started_ns)
            frames.append((link, frame))
        self._errors.clear()
        self._says_drain = False
        forward_ns = time.perf_counter_ns() - started_ns
        for _, frame in frames:
            for result in frame.results:
                result.forward_ns = forward_ns
                if self._spoil("bad_times"):
                    result.forward_ns = result.queue_ns = (1 << 64) - 1
        return frames

    def _answer(
        self, frame: VerifyLinkResponse, link: FakeLink, sequence_id: int, sequence: _Sequence, started_ns: int
    ) -> None:
        if self._has_pending_prompt_logprobs(sequence):
            frame.prompt_logprobs.append(self._prompt_part(sequence_id, sequence))
            return
        if self.prefill_rows and sequence.num_missing_kv > self.prefill_rows:
            sequence.num_missing_kv -= self.prefill_rows
            frame.pending_ids.append(sequence_id)
            return
        if not sequence.blocks:
            if self._is_granted(sequence):
                frame.results.append(self._result(sequence_id, sequence, DraftBlock(), 0))
            return
        block, arrived_ns = sequence.blocks.popleft()
        if self.faults.error_code:
            frame.errors.append(LinkError(sequence_id=sequence_id, code=self.faults.error_code, message="fake error"))
            self.faults.error_code = 0
            link.sequences.pop(sequence_id)
            return
        if not block.draft_ids:
            sequence.granted_length = max(sequence.granted_length, block.base_length + max(1, block.num_plain_steps))
            if self._is_granted(sequence):
                frame.results.append(self._result(sequence_id, sequence, block, started_ns - arrived_ns))
        elif block.base_length != sequence.length or self._spoil("stale"):
            sequence.granted_length = 0
            frame.stales.append(Stale(sequence_id=sequence_id, length=sequence.length))
        else:
            self.num_blocks += 1
            frame.results.append(self._result(sequence_id, sequence, block, started_ns - arrived_ns))

    @staticmethod
    def _has_pending_prompt_logprobs(sequence: _Sequence) -> bool:
        return sequence.next_to_send < len(sequence.entry.prompt_ids)

    def _prompt_part(self, sequence_id: int, sequence: _Sequence) -> PromptLogprobs:
        """The entries of one step; each names its token and encodes its position as logprob."""
        first, prompt_ids = sequence.next_to_send, sequence.entry.prompt_ids
        part = PromptLogprobs(sequence_id=sequence_id, first_position=first)
        for token_id in prompt_ids[first : first + self.prefill_rows] if self.prefill_rows else prompt_ids[first:]:
            logprob = -0.5 * sequence.next_to_send
            part.logprobs.append(TokenLogprobs(logprob=logprob, top_ids=[token_id], top_logprobs=[logprob]))
            sequence.next_to_send += 1
        if self._spoil("bad_prompt_position"):
            part.first_position += 1
        if self._spoil("bad_prompt_logprobs"):
            part.logprobs[0].logprob = float("nan")
        return part

    def _result(self, sequence_id: int, sequence: _Sequence, block: DraftBlock, queue_ns: int) -> VerificationResult:
        result = VerificationResult(
            sequence_id=sequence_id,
            base_length=sequence.length,
            num_draft_tokens=len(block.draft_ids),
            queue_ns=max(0, queue_ns),
        )
        emitted, path = self._walk(sequence.cursor, block)
        result.num_accepted = len(path)
        if block.parents:
            result.path.extend(path)
        result.next_id = emitted[-1]
        sequence.length += len(emitted)
        if sequence.entry.sampling.HasField("logprobs"):
            for token_id in emitted:
                result.logprobs.append(TokenLogprobs(logprob=-0.5, top_ids=[token_id], top_logprobs=[-0.5]))
        if sequence.cursor.num_output > 0 and emitted[-1] in self._end_ids(sequence):
            sequence.granted_length = 0
        if self._spoil("bad_next_id"):
            result.next_id = self.model.vocab_size + 7
        if self._spoil("bad_base"):
            result.base_length += 1
        if self._spoil("bad_accepted"):
            result.num_accepted = len(block.draft_ids) + 1
        if result.logprobs and self._spoil("bad_logprobs"):
            result.logprobs[0].logprob = float("nan")
        if result.logprobs and self._spoil("bad_top_logprobs"):
            result.logprobs[0].top_ids.append(0)
        if result.logprobs and self._spoil("no_logprobs"):
            del result.logprobs[:]
        if self._spoil("bad_path") and path:
            result.path[0] = len(block.draft_ids)
        return result

    @staticmethod
    def _walk(cursor: FakeCursor, block: DraftBlock) -> tuple[list[int], list[int]]:
        """The tokens decided, which the cursor then has, and the nodes accepted."""
        parents = block.parents or range(-1, len(block.draft_ids) - 1)
        emitted: list[int] = []
        path: list[int] = []
        while True:
            emitted.append(cursor.next_id())
            cursor.push(emitted[-1])
            last = path[-1] if path else -1
            children = [n for n, parent in enumerate(parents) if parent == last and block.draft_ids[n] == emitted[-1]]
            if not children:
                return emitted, path
            path.append(children[0])

    def _check_block(self, sequence: _Sequence, block: DraftBlock) -> None:
        num_draft = len(block.draft_ids)
        if num_draft and sequence.blocks:
            self.violations.append("a block while another is unanswered")
        if num_draft and self._is_granted(sequence):
            self.violations.append("a drafted block during a grant")
        if num_draft > sequence.entry.max_length - block.base_length - 1:
            self.violations.append(f"{num_draft} draft tokens at {block.base_length} of {sequence.entry.max_length}")
        if block.parents and not self.hello.supports_trees:
            self.violations.append("a tree for a worker that takes chains")
        if num_draft > self.hello.max_draft_tokens:
            self.violations.append(f"{num_draft} draft tokens in a block")
        if any(token_id >= self.model.vocab_size for token_id in block.draft_ids):
            self.violations.append("draft ids outside the vocabulary")
        if not num_draft and block.base_length > sequence.length:
            self.violations.append("a grant beyond the committed length")

    def _end_ids(self, sequence: _Sequence) -> set[int]:
        sampling = sequence.entry.sampling
        return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sequence.entry.eos_token_ids))

    def _is_granted(self, sequence: _Sequence) -> bool:
        return sequence.length < min(sequence.granted_length, sequence.entry.max_length)

    def _refuse(self, link: FakeLink, sequence_id: int, code: int) -> None:
        self._errors.append((link, LinkError(sequence_id=sequence_id, code=code, message="fake refusal")))

    def _spoil(self, fault: str) -> bool:
        left: int = getattr(self.faults, fault)
        if left > 0:
            setattr(self.faults, fault, left - 1)
        return left > 0

    def _load(self) -> Load:
        return Load(
            running=self.num_open,
            free_pages=_TOTAL_PAGES - self.num_open,
            total_pages=_TOTAL_PAGES,
            tokens_per_s=self.tokens_per_s,
            row_price=self.row_price,
        )
