"""The response of GetModelInfo: the served model, its workers and their drafters."""

from __future__ import annotations

from betoken.common.release import __version__
from betoken.router.core import Router
from betoken.router.request.worker_identity import ServedModel
from betoken.router.workers.draft_worker import DraftWorker
from betoken.router.workers.verify_worker import SILENCE, VerifyWorker
from betoken.rpc.sampling import NEUTRAL
from betoken.v1 import generation_pb2 as pb

_MAX_NS = (1 << 64) - 1


def model_info(router: Router, served: ServedModel | None, *, exposes_addresses: bool) -> pb.GetModelInfoResponse:
    """The description of the served model, if one is known, and of all workers."""
    fleet = router.fleet
    response = pb.GetModelInfoResponse(
        drafters=fleet.ready_drafters,
        sources=fleet.sources,
        default_drafter=router.drafters.default,
        verify_workers=[_worker_info(worker, router, exposes_addresses) for worker in fleet.verify.workers],
        draft_workers=[_worker_info(worker, router, exposes_addresses) for worker in fleet.draft.workers],
        has_chat_template=router.tokenizer.chat_template is not None,
        tool_format=router.tokenizer.tool_format,
        version=__version__,
        speculation_policies=router.policies.messages(),
        requires_api_key=router.keys.are_needed,
        num_overlap_outcomes=router.settings.num_outcomes,
        supports_infill=router.tokenizer.infill is not None,
    )
    if served is not None:
        _describe(response, served)
        response.default_num_draft_tokens = router.drafters.default_num_draft_tokens(served.hello)
    return response


def _describe(response: pb.GetModelInfoResponse, served: ServedModel) -> None:
    hello = served.hello
    response.model = hello.model_id
    response.vocab_size = hello.vocab_size
    response.max_context = hello.max_context
    response.eos_token_ids.extend(served.eos_token_ids)
    response.default_sampling.MergeFrom(NEUTRAL)
    response.default_sampling.MergeFrom(hello.default_sampling)
    response.verification_modes.extend(hello.verification_modes)
    response.system_fingerprint = served.system_fingerprint


def _worker_info(worker: VerifyWorker | DraftWorker, router: Router, exposes_addresses: bool) -> pb.WorkerInfo:
    link = worker.link
    info = pb.WorkerInfo(address=link.address, state=link.state, detail=link.detail)
    if link.loading is not None:
        info.loading_fraction = link.loading.fraction
    if isinstance(worker, VerifyWorker) and worker.is_silent and worker.is_ready:
        info.detail = SILENCE
    if link.is_up and link.hello is not None:
        info.hello.CopyFrom(link.hello)
        if isinstance(worker, DraftWorker):
            info.detail = info.detail or router.fleet.short_context(link.hello)
    if link.load is not None:
        info.load.CopyFrom(link.load)
        for cost in info.hello.step_costs if link.load.step_time_ratio > 0 else ():
            cost.ns = round(min(_MAX_NS, cost.ns * link.load.step_time_ratio))  # the ratio may be infinite
    if not exposes_addresses:
        info.address = ""
        info.detail = info.detail if link.loading is not None else ""
        if info.HasField("hello"):
            info.hello.ClearField("worker_id")  # holds the host's name
    return info
