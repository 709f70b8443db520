"""The served model and its workers, as the router describes them.

Built from protocol messages; knows nothing of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from betoken.client.config import Sampling, VerificationMode
from betoken.client.from_message import from_message
from betoken.client.modes import FROM_PROTO
from betoken.client.speculation_policy import SpeculationPolicy
from betoken.common.errors import LoadingError
from betoken.common.float32 import shortest
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2

_LISTS = ("stop", "stop_token_ids")


@dataclass(frozen=True, slots=True)
class StepCost:
    """One measured step time of a worker."""

    rows: int
    """Tokens in the forward."""
    context: int
    """Context length of each, tokens."""
    time_s: float
    """Least forward time that was seen."""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """A drafter as the source of tokens, for people."""

    name: str
    """Name in `Token.source`."""
    explains: str
    """Words for a token of this source."""
    colour: str
    """One of the 16 colours of a terminal, perhaps underlined."""


@dataclass(frozen=True, slots=True)
class DraftTranslation:
    """How a draft worker translates the drafts of a model with another tokenizer than the target's."""

    is_by_token: bool
    """Whether drafts consist of tokens that both tokenizers have (TLI); False = their text is encoded again (SLEM)."""
    coverage: float
    """Share of the target's tokens in a sample text that the draft model has, 0 to 1."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the router sees it; what its handshake says is empty or 0 while it is not connected."""

    address: str
    state: str
    """"ready", "loading", "connecting", "draining" or "refused"."""
    detail: str
    """Why, when not ready, such as the stage of a loading one; of a ready one what is amiss with it, if anything."""
    loading_fraction: float
    """Done of a loading worker's start, 0 to 1; 0 in other states."""
    role: str
    """"verify" or "draft"."""
    worker_id: str
    model_id: str
    dtype: str
    weights_fingerprint: str
    tokenizer_hash: str
    max_sequences: int
    max_draft_tokens: int
    drafters: tuple[str, ...]
    supports_trees: bool
    step_costs: tuple[StepCost, ...]
    running: int
    """Open sequences that do not wait, including sequences that wait for their router."""
    waiting: int
    """Sequences with something to compute that hold no pages; 0 of draft workers."""
    weight_bytes: int
    """Bytes of its models' weights in the form they are kept in; 0 = not known, or no model."""
    kv_bytes: int
    """Bytes of all KV pages; on a CPU they take memory as they are used."""
    other_bytes: int
    """Bytes of the rest of the process when it was loaded; 0 = not known."""
    sequence_state_bytes: int
    """Bytes of one open sequence's recurrent states; 0 for a model without."""
    snapshot_limit_bytes: int
    """Most bytes of snapshots of recurrent states; 0 for a model without, or without prefix caching."""
    free_pages: int
    """Free KV pages; all of them when idle."""
    total_pages: int
    preemptions: int
    """Times since its start that a sequence lost its pages to another and was to be recomputed."""
    cached_tokens: int
    """Verify workers: tokens since its start whose KV was reused and not computed."""
    snapshot_bytes: int
    """Verify workers: bytes of the snapshots of recurrent states that it keeps."""
    tensor_parallel_degree: int
    """Processes that share the columns of each of its model's layers; tokens do not depend on it. 0 = not known."""
    pipeline_parallel_degree: int
    """Pipeline stages of its model, each with `tensor_parallel_degree` processes; 0 = not known."""
    memory_documents: int
    """Earlier texts that its drafters keep to draft from; 0 without such a drafter."""
    memory_tokens: int
    """Tokens of these texts."""
    memory_hits: int
    """Drafts from earlier texts since its start."""
    memory_evictions: int
    """Earlier texts evicted since its start."""
    is_synthetic: bool
    """Whether it simulates its model: tokens, acceptance and times are made up."""
    mask_token_id: int | None
    """Mask token of a draft worker's PARD model, which drafts all tokens of a round in one forward; None without."""
    translation: DraftTranslation | None
    """Translation of a draft worker's drafts, if its model has another tokenizer; None without."""

    @classmethod
    def from_proto(cls, message: pb.WorkerInfo, role: str) -> WorkerStatus:
        hello = message.hello
        costs = tuple(StepCost(cost.rows, cost.context, cost.ns * 1e-9) for cost in hello.step_costs)
        mask = hello.mask_token_id if hello.HasField("mask_token_id") else None
        given: dict[str, Any] = {"role": hello.role or role, "step_costs": costs, "mask_token_id": mask}
        is_translated = hello.HasField("translation")
        given["translation"] = from_message(DraftTranslation, hello.translation) if is_translated else None
        return from_message(cls, message, hello, message.load, **given)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the model's template writes calls of tools."""

    name: str
    """Name as listed in docs/http.md, such as "hermes" (Qwen too) or "mistral"; empty = unknown."""
    mark_ids: Mapping[str, int]
    """Ids of the marks around calls that are special tokens, by their text."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a router's service."""

    model: str
    """Its id; empty = no verify worker has been met yet, and what only one knows is empty or 0 as well."""
    vocab_size: int
    max_context: int
    """Largest prompt + output, tokens."""
    eos_token_ids: tuple[int, ...]
    default_sampling: Sampling
    """Default of requests."""
    drafters: tuple[str, ...]
    """Offered right now."""
    default_drafter: str
    """Empty = plain decoding."""
    default_num_draft_tokens: int
    """Per round; 0 = adaptive."""
    num_overlap_outcomes: int
    """Outcomes of each verification that draft workers draft ahead for; 0 = rounds are not overlapped."""
    verification_modes: tuple[VerificationMode, ...]
    verify_workers: tuple[WorkerStatus, ...]
    draft_workers: tuple[WorkerStatus, ...]
    has_chat_template: bool
    version: str
    """Version of the router."""
    system_fingerprint: str
    """Same request, seed and fingerprint = same tokens."""
    sources: tuple[SourceInfo, ...] = ()
    """Sources that tokens may have."""
    tool_format: ToolFormat = field(default_factory=lambda: ToolFormat("", {}))
    """Form in which the chat template has tools called."""
    speculation_policies: tuple[SpeculationPolicy, ...] = ()
    """State of the speculation policy of each kind of requests served so far."""
    requires_api_key: bool = False
    """Whether the router has API keys: all calls except `model_info` need one."""
    supports_infill: bool = False
    """Whether requests may have a `suffix`: the tokenizer has fill-in-the-middle tokens."""

    @property
    def loading(self) -> LoadingError | None:
        """Progress of the verify worker that will be ready first; None if one is ready, or none loads."""
        workers = [worker for worker in self.verify_workers if worker.state == "loading"]
        if not workers or any(worker.state == "ready" for worker in self.verify_workers):
            return None
        furthest = max(workers, key=lambda worker: worker.loading_fraction)
        return LoadingError(furthest.detail, furthest.loading_fraction)

    @classmethod
    def from_proto(cls, message: pb.GetModelInfoResponse) -> ModelInfo:
        return from_message(
            cls,
            message,
            default_sampling=_sampling(message.default_sampling),
            verification_modes=tuple(FROM_PROTO[mode] for mode in message.verification_modes if mode in FROM_PROTO),
            verify_workers=tuple(WorkerStatus.from_proto(worker, "verify") for worker in message.verify_workers),
            draft_workers=tuple(WorkerStatus.from_proto(worker, "draft") for worker in message.draft_workers),
            sources=tuple(from_message(SourceInfo, source) for source in message.sources),
            tool_format=from_message(ToolFormat, message.tool_format),
            speculation_policies=tuple(from_message(SpeculationPolicy, each) for each in message.speculation_policies),
        )


def _sampling(message: types_pb2.SamplingParams) -> Sampling:
    scalars: dict[str, Any] = {
        field.name: _written(getattr(message, field.name))
        for field in fields(Sampling)
        if field.name not in (*_LISTS, "logit_bias") and message.HasField(field.name)
    }
    lists: dict[str, Any] = {name: tuple(getattr(message, name)) for name in _LISTS if getattr(message, name)}
    bias = {entry.token_id: shortest(entry.bias) for entry in message.logit_bias}
    return Sampling(**scalars, **lists, logit_bias=bias or None)


def _written(value: object) -> object:
    """0.95 if the message's float32 is 0.949999988: the value that rules use."""
    return shortest(value) if isinstance(value, float) else value
