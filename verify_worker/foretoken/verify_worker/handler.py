"""Between links and the verify core: validate and convert, hand over to the model thread, convert back.

No tensors, no policy. A bad entry is answered with an error for its sequence; all others go on.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from foretoken.engine.model_thread import ModelThread
from foretoken.engine.runner import ModelInfo
from foretoken.engine.sampling import SamplingParams
from foretoken.rpc.errors import ForetokenError, to_link_error
from foretoken.rpc.link import LinkPeer
from foretoken.rpc.sampling import sampling_fields
from foretoken.rpc.validation import WorkerLimits, validate_block, validate_open
from foretoken.v1 import types_pb2, verify_pb2
from foretoken.verify_worker.core import VerifyCore, VerifyLoad
from foretoken.verify_worker.sequence import Block, Decision, SequenceKey, VerifySequence


class LinkResults:
    """The core's sink: turns what happened on the model thread into frames, one per link and forward."""

    def __init__(self) -> None:
        self._links: dict[int, LinkPeer[verify_pb2.VerifyLinkResponse]] = {}

    def add(self, link: LinkPeer[verify_pb2.VerifyLinkResponse]) -> None:
        self._links[link.id] = link

    def remove(self, link_id: int) -> None:
        self._links.pop(link_id, None)

    def decided(self, decisions: list[Decision], load: VerifyLoad) -> None:
        frames: dict[int, verify_pb2.VerifyLinkResponse] = {}
        for decision in decisions:
            frame = frames.get(decision.key[0])
            if frame is None:
                frame = frames[decision.key[0]] = verify_pb2.VerifyLinkResponse(load=_load(load))
            frame.verdicts.append(_verdict(decision))
        for link_id, frame in frames.items():
            self._send(link_id, frame)

    def stale(self, key: SequenceKey, length: int) -> None:
        stale = verify_pb2.Stale(sequence_id=key[1], length=length)
        self._send(key[0], verify_pb2.VerifyLinkResponse(stales=[stale]))

    def failed(self, key: SequenceKey, error: ForetokenError) -> None:
        self._send(key[0], verify_pb2.VerifyLinkResponse(errors=[to_link_error(error, key[1])]))

    def load_changed(self, load: VerifyLoad) -> None:
        for link_id in list(self._links):
            self._send(link_id, verify_pb2.VerifyLinkResponse(load=_load(load)))

    def _send(self, link_id: int, frame: verify_pb2.VerifyLinkResponse) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.send(frame)


class VerifyLinkHandler:
    """Takes the frames of all routers; called on the event loop."""

    def __init__(
        self, thread: ModelThread[VerifyCore], results: LinkResults, info: ModelInfo, limits: WorkerLimits
    ) -> None:
        self._thread = thread
        self._results = results
        self._info = info
        self._limits = limits

    def link_opened(self, link: LinkPeer[Any]) -> None:
        self._results.add(link)

    def frame(self, link: LinkPeer[Any], request: verify_pb2.VerifyLinkRequest) -> None:
        """Hand the whole frame to the model thread as one call, so that its blocks share a forward."""
        arrived_ns = time.perf_counter_ns()
        calls = [
            *self._checked(link, request.opens, lambda entry: self._open(link, entry, arrived_ns)),
            *self._checked(link, request.blocks, lambda entry: self._block(link, entry, arrived_ns)),
            *self._checked(link, request.closes, lambda entry: self._close(link, entry)),
        ]
        if calls:
            self._thread.submit(lambda core: [call(core) for call in calls] and None)

    def link_closed(self, link: LinkPeer[Any]) -> None:
        self._results.remove(link.id)
        self._thread.submit(lambda core: core.close_link(link.id))

    def _checked(
        self, link: LinkPeer[Any], entries: Iterable[Any], convert: Callable[[Any], Callable[[VerifyCore], None]]
    ) -> list[Callable[[VerifyCore], None]]:
        """The entries as calls on the core; refused ones are answered here."""
        calls = []
        for entry in entries:
            try:
                calls.append(convert(entry))
            except ForetokenError as error:
                self._results.failed((link.id, entry.sequence_id), error)
                calls.append(self._close(link, entry))
        return calls

    def _open(
        self, link: LinkPeer[Any], entry: types_pb2.OpenSequence, arrived_ns: int
    ) -> Callable[[VerifyCore], None]:
        validate_open(entry, self._limits)
        sequence = VerifySequence(
            key=(link.id, entry.sequence_id),
            params=SamplingParams(**sampling_fields(entry)),
            prompt_ids=list(entry.prompt_ids),
            output_ids=list(entry.committed_ids),
            max_length=entry.max_length,
            opened_ns=arrived_ns,
            deadline_s=time.monotonic() + entry.deadline_ms / 1000 if entry.deadline_ms else None,
        )
        return lambda core: core.open(sequence)

    def _block(
        self, link: LinkPeer[Any], entry: verify_pb2.DraftBlock, arrived_ns: int
    ) -> Callable[[VerifyCore], None]:
        validate_block(entry, self._limits)
        key = (link.id, entry.sequence_id)
        base_length, num_plain_steps = entry.base_length, entry.num_plain_steps
        block = Block(list(entry.draft_ids), arrived_ns)
        return lambda core: core.verify(key, base_length, block, num_plain_steps)

    def _close(self, link: LinkPeer[Any], entry: Any) -> Callable[[VerifyCore], None]:
        key = (link.id, entry.sequence_id)
        return lambda core: core.close(key)


def _verdict(decision: Decision) -> verify_pb2.Verdict:
    verdict = verify_pb2.Verdict(
        sequence_id=decision.key[1],
        base_length=decision.base_length,
        num_accepted=decision.num_accepted,
        next_id=decision.next_id,
        queue_ns=decision.queue_ns,
        forward_ns=decision.forward_ns,
        num_draft_tokens=decision.num_draft_tokens,
    )
    for logprob in decision.logprobs:
        verdict.logprobs.add(
            logprob=logprob.logprob, top_ids=logprob.top_ids, top_logprobs=logprob.top_logprobs
        )
    return verdict


def _load(load: VerifyLoad) -> types_pb2.Load:
    return types_pb2.Load(
        running=load.num_running,
        waiting=load.num_waiting,
        free_pages=load.num_free_pages,
        total_pages=load.num_pages,
    )
