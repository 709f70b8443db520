"""Between links and the draft core: validate and convert, hand over to the model thread, convert back.

No tensors, no policy. A bad entry is answered with an error for its sequence; all others go on.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

from foretoken.draft_worker.core import DraftAnswer, DraftCore, DraftLoad
from foretoken.draft_worker.drafter import DraftSequence, SequenceKey
from foretoken.engine.model_thread import ModelThread
from foretoken.engine.sampling import SamplingParams
from foretoken.rpc.errors import ForetokenError, to_link_error
from foretoken.rpc.link import LinkPeer
from foretoken.rpc.sampling import sampling_fields
from foretoken.rpc.validation import WorkerLimits, validate_commit, validate_draft_request, validate_open
from foretoken.v1 import draft_pb2, types_pb2

SOURCES = {
    "model": types_pb2.DRAFT_SOURCE_MODEL,
    "ngram": types_pb2.DRAFT_SOURCE_NGRAM,
}
"""Provenance of a drafter's tokens by the drafter's name."""


class LinkResults:
    """The core's sink: turns finished drafts into frames, one per link and step."""

    def __init__(self) -> None:
        self._links: dict[int, LinkPeer[draft_pb2.DraftLinkResponse]] = {}

    def add(self, link: LinkPeer[draft_pb2.DraftLinkResponse]) -> None:
        self._links[link.id] = link

    def remove(self, link_id: int) -> None:
        self._links.pop(link_id, None)

    def drafted(self, answers: list[DraftAnswer], load: DraftLoad) -> None:
        frames: dict[int, draft_pb2.DraftLinkResponse] = {}
        for answer in answers:
            frame = frames.get(answer.key[0])
            if frame is None:
                frame = frames[answer.key[0]] = draft_pb2.DraftLinkResponse(load=_load(load))
            frame.blocks.append(_block(answer))
        for link_id, frame in frames.items():
            self._send(link_id, frame)

    def failed(self, key: SequenceKey, error: ForetokenError) -> None:
        self._send(key[0], draft_pb2.DraftLinkResponse(errors=[to_link_error(error, key[1])]))

    def load_changed(self, load: DraftLoad) -> None:
        for link_id in list(self._links):
            self._send(link_id, draft_pb2.DraftLinkResponse(load=_load(load)))

    def _send(self, link_id: int, frame: draft_pb2.DraftLinkResponse) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.send(frame)


class DraftLinkHandler:
    """Takes the frames of all routers; called on the event loop."""

    def __init__(self, thread: ModelThread[DraftCore], results: LinkResults, limits: WorkerLimits) -> None:
        self._thread = thread
        self._results = results
        self._limits = limits

    def link_opened(self, link: LinkPeer[Any]) -> None:
        self._results.add(link)

    def frame(self, link: LinkPeer[Any], request: draft_pb2.DraftLinkRequest) -> None:
        """Hand the whole frame to the model thread as one call; commits apply before requests."""
        arrived_ns = time.perf_counter_ns()
        calls = [
            *self._checked(link, request.opens, lambda entry: self._open(link, entry)),
            *self._checked(link, request.commits, lambda entry: self._commit(link, entry)),
            *self._checked(link, request.requests, lambda entry: self._request(link, entry, arrived_ns)),
            *self._checked(link, request.closes, lambda entry: self._close(link, entry)),
        ]
        if calls:
            self._thread.submit(lambda core: [call(core) for call in calls] and None)

    def link_closed(self, link: LinkPeer[Any]) -> None:
        self._results.remove(link.id)
        self._thread.submit(lambda core: core.close_link(link.id))

    def _checked(
        self, link: LinkPeer[Any], entries: Iterable[Any], convert: Callable[[Any], Callable[[DraftCore], None]]
    ) -> list[Callable[[DraftCore], None]]:
        """The entries as calls on the core; refused ones are answered here."""
        calls = []
        for entry in entries:
            try:
                calls.append(convert(entry))
            except ForetokenError as error:
                self._results.failed((link.id, entry.sequence_id), error)
                calls.append(self._close(link, entry))
        return calls

    def _open(self, link: LinkPeer[Any], entry: types_pb2.OpenSequence) -> Callable[[DraftCore], None]:
        validate_open(entry, self._limits)
        params = SamplingParams(**sampling_fields(entry))
        sequence = DraftSequence(
            key=(link.id, entry.sequence_id),
            params=dataclasses.replace(params, num_logprobs=None),
            prompt_ids=list(entry.prompt_ids),
            output_ids=list(entry.committed_ids),
            max_length=entry.max_length,
            settings=dict(entry.drafter.settings),
            deadline_s=time.monotonic() + entry.deadline_ms / 1000 if entry.deadline_ms else None,
        )
        name = entry.drafter.name
        return lambda core: core.open(sequence, name)

    def _commit(self, link: LinkPeer[Any], entry: draft_pb2.Commit) -> Callable[[DraftCore], None]:
        validate_commit(entry, self._limits)
        key, base_length, ids = (link.id, entry.sequence_id), entry.base_length, list(entry.ids)
        return lambda core: core.commit(key, base_length, ids)

    def _request(
        self, link: LinkPeer[Any], entry: draft_pb2.DraftRequest, arrived_ns: int
    ) -> Callable[[DraftCore], None]:
        validate_draft_request(entry, self._limits)
        key, num_tokens = (link.id, entry.sequence_id), entry.num_tokens
        return lambda core: core.request(key, num_tokens, arrived_ns)

    def _close(self, link: LinkPeer[Any], entry: Any) -> Callable[[DraftCore], None]:
        key = (link.id, entry.sequence_id)
        return lambda core: core.close(key)


def _block(answer: DraftAnswer) -> draft_pb2.DraftedBlock:
    return draft_pb2.DraftedBlock(
        sequence_id=answer.key[1],
        base_length=answer.base_length,
        ids=answer.draft_ids,
        sources=[SOURCES[answer.drafter]] * len(answer.draft_ids),
        queue_ns=answer.queue_ns,
        forward_ns=answer.forward_ns,
    )


def _load(load: DraftLoad) -> types_pb2.Load:
    return types_pb2.Load(
        running=load.num_running,
        waiting=load.num_waiting,
        free_pages=load.num_free_pages,
        total_pages=load.num_pages,
    )
