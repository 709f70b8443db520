from betoken.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "extra")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    extra: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., extra: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "tools", "template_arguments", "continue_final_message", "escape_special_tokens")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ESCAPE_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedScalarFieldContainer[str]
    template_arguments: str
    continue_final_message: bool
    escape_special_tokens: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[str]] = ..., template_arguments: _Optional[str] = ..., continue_final_message: _Optional[bool] = ..., escape_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Infill(_message.Message):
    __slots__ = ("prefix", "suffix", "files")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    suffix: str
    files: _containers.RepeatedCompositeFieldContainer[InfillFile]
    def __init__(self, prefix: _Optional[str] = ..., suffix: _Optional[str] = ..., files: _Optional[_Iterable[_Union[InfillFile, _Mapping]]] = ...) -> None: ...

class InfillFile(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("drafter", "num_draft_tokens", "off", "mode", "report_rounds", "posterior_threshold", "posterior_alpha")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REPORT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    POSTERIOR_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    POSTERIOR_ALPHA_FIELD_NUMBER: _ClassVar[int]
    drafter: _types_pb2.DrafterChoice
    num_draft_tokens: int
    off: bool
    mode: _types_pb2.VerificationMode
    report_rounds: bool
    posterior_threshold: float
    posterior_alpha: float
    def __init__(self, drafter: _Optional[_Union[_types_pb2.DrafterChoice, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., off: _Optional[bool] = ..., mode: _Optional[_Union[_types_pb2.VerificationMode, str]] = ..., report_rounds: _Optional[bool] = ..., posterior_threshold: _Optional[float] = ..., posterior_alpha: _Optional[float] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "prompt_ids", "messages", "infill", "model", "sampling", "speculation", "resume_ids", "tenant", "n", "system_fingerprint", "add_special_tokens", "constraint", "prediction", "resume_prompt_logprobs")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    INFILL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    RESUME_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    prompt_ids: TokenIds
    messages: ChatMessages
    infill: Infill
    model: str
    sampling: _types_pb2.SamplingParams
    speculation: Speculation
    resume_ids: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    n: int
    system_fingerprint: str
    add_special_tokens: bool
    constraint: _types_pb2.Constraint
    prediction: Prediction
    resume_prompt_logprobs: int
    def __init__(self, prompt: _Optional[str] = ..., prompt_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., infill: _Optional[_Union[Infill, _Mapping]] = ..., model: _Optional[str] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., resume_ids: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., n: _Optional[int] = ..., system_fingerprint: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ..., constraint: _Optional[_Union[_types_pb2.Constraint, _Mapping]] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., resume_prompt_logprobs: _Optional[int] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("text", "ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("prompt_ids", "seed", "model", "request_id", "mode", "drafter", "sampling", "system_fingerprint")
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    model: str
    request_id: str
    mode: _types_pb2.VerificationMode
    drafter: str
    sampling: _types_pb2.SamplingParams
    system_fingerprint: str
    def __init__(self, prompt_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., request_id: _Optional[str] = ..., mode: _Optional[_Union[_types_pb2.VerificationMode, str]] = ..., drafter: _Optional[str] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., system_fingerprint: _Optional[str] = ...) -> None: ...

class GeneratedToken(_message.Message):
    __slots__ = ("id", "origin", "logprobs", "num_chars", "source", "num_held_chars")
    ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_CHARS_FIELD_NUMBER: _ClassVar[int]
    id: int
    origin: _types_pb2.TokenOrigin
    logprobs: _types_pb2.TokenLogprobs
    num_chars: int
    source: str
    num_held_chars: int
    def __init__(self, id: _Optional[int] = ..., origin: _Optional[_Union[_types_pb2.TokenOrigin, str]] = ..., logprobs: _Optional[_Union[_types_pb2.TokenLogprobs, _Mapping]] = ..., num_chars: _Optional[int] = ..., source: _Optional[str] = ..., num_held_chars: _Optional[int] = ...) -> None: ...

class RoundTimes(_message.Message):
    __slots__ = ("num_tokens", "num_draft_tokens", "num_accepted_tokens", "begin_ns", "duration_ns", "draft_queue_ns", "draft_forward_ns", "verify_queue_ns", "verify_forward_ns")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    begin_ns: int
    duration_ns: int
    draft_queue_ns: int
    draft_forward_ns: int
    verify_queue_ns: int
    verify_forward_ns: int
    def __init__(self, num_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., begin_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ..., draft_queue_ns: _Optional[int] = ..., draft_forward_ns: _Optional[int] = ..., verify_queue_ns: _Optional[int] = ..., verify_forward_ns: _Optional[int] = ...) -> None: ...

class GenerateTokens(_message.Message):
    __slots__ = ("tokens", "text", "rounds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[GeneratedToken]
    text: str
    rounds: _containers.RepeatedCompositeFieldContainer[RoundTimes]
    def __init__(self, tokens: _Optional[_Iterable[_Union[GeneratedToken, _Mapping]]] = ..., text: _Optional[str] = ..., rounds: _Optional[_Iterable[_Union[RoundTimes, _Mapping]]] = ...) -> None: ...

class GeneratePromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_prompt_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_per_position", "num_drafted_per_position", "num_verify_forwards", "num_emitted_tokens", "draft_forward_ns", "draft_queue_ns", "verify_forward_ns", "verify_queue_ns", "round_ns", "num_failed_drafts", "num_failovers", "router_overhead_p50_ns", "num_rounds", "first_draft_forward_ns", "num_draft_forwards", "num_accepted_prediction_tokens", "num_rejected_prediction_tokens", "num_failed_drafts_by_reason", "policy", "draft_outcomes", "num_ahead_hits", "num_ahead_misses", "num_ahead_tokens", "num_used_ahead_tokens", "is_synthetic")
    class NumFailedDraftsByReasonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFY_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    ROUND_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_OVERHEAD_P50_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DRAFT_FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_DRAFTS_BY_REASON_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_verify_forwards: int
    num_emitted_tokens: int
    draft_forward_ns: int
    draft_queue_ns: int
    verify_forward_ns: int
    verify_queue_ns: int
    round_ns: int
    num_failed_drafts: int
    num_failovers: int
    router_overhead_p50_ns: int
    num_rounds: int
    first_draft_forward_ns: int
    num_draft_forwards: int
    num_accepted_prediction_tokens: int
    num_rejected_prediction_tokens: int
    num_failed_drafts_by_reason: _containers.ScalarMap[str, int]
    policy: SpeculationPolicy
    draft_outcomes: _containers.RepeatedCompositeFieldContainer[DraftOutcomes]
    num_ahead_hits: int
    num_ahead_misses: int
    num_ahead_tokens: int
    num_used_ahead_tokens: int
    is_synthetic: bool
    def __init__(self, num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_accepted_per_position: _Optional[_Iterable[int]] = ..., num_drafted_per_position: _Optional[_Iterable[int]] = ..., num_verify_forwards: _Optional[int] = ..., num_emitted_tokens: _Optional[int] = ..., draft_forward_ns: _Optional[int] = ..., draft_queue_ns: _Optional[int] = ..., verify_forward_ns: _Optional[int] = ..., verify_queue_ns: _Optional[int] = ..., round_ns: _Optional[int] = ..., num_failed_drafts: _Optional[int] = ..., num_failovers: _Optional[int] = ..., router_overhead_p50_ns: _Optional[int] = ..., num_rounds: _Optional[int] = ..., first_draft_forward_ns: _Optional[int] = ..., num_draft_forwards: _Optional[int] = ..., num_accepted_prediction_tokens: _Optional[int] = ..., num_rejected_prediction_tokens: _Optional[int] = ..., num_failed_drafts_by_reason: _Optional[_Mapping[str, int]] = ..., policy: _Optional[_Union[SpeculationPolicy, _Mapping]] = ..., draft_outcomes: _Optional[_Iterable[_Union[DraftOutcomes, _Mapping]]] = ..., num_ahead_hits: _Optional[int] = ..., num_ahead_misses: _Optional[int] = ..., num_ahead_tokens: _Optional[int] = ..., num_used_ahead_tokens: _Optional[int] = ..., is_synthetic: _Optional[bool] = ...) -> None: ...

class DraftOutcomes(_message.Message):
    __slots__ = ("length", "num_drafts_by_accepted")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_BY_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    length: int
    num_drafts_by_accepted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, length: _Optional[int] = ..., num_drafts_by_accepted: _Optional[_Iterable[int]] = ...) -> None: ...

class SpeculationPolicy(_message.Message):
    __slots__ = ("drafter", "is_attached", "is_sampled", "has_prediction", "is_on", "expected_speedup", "reason")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    IS_ATTACHED_FIELD_NUMBER: _ClassVar[int]
    IS_SAMPLED_FIELD_NUMBER: _ClassVar[int]
    HAS_PREDICTION_FIELD_NUMBER: _ClassVar[int]
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    is_attached: bool
    is_sampled: bool
    has_prediction: bool
    is_on: bool
    expected_speedup: float
    reason: str
    def __init__(self, drafter: _Optional[str] = ..., is_attached: _Optional[bool] = ..., is_sampled: _Optional[bool] = ..., has_prediction: _Optional[bool] = ..., is_on: _Optional[bool] = ..., expected_speedup: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class GenerateFinish(_message.Message):
    __slots__ = ("reason", "stop", "usage", "speculation", "queue_ns", "time_to_first_token_ns", "duration_ns")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop: str
    usage: Usage
    speculation: SpeculationStats
    queue_ns: int
    time_to_first_token_ns: int
    duration_ns: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., queue_ns: _Optional[int] = ..., time_to_first_token_ns: _Optional[int] = ..., duration_ns: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("start", "tokens", "finish", "prompt_logprobs", "answer")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    start: GenerateStart
    tokens: GenerateTokens
    finish: GenerateFinish
    prompt_logprobs: GeneratePromptLogprobs
    answer: int
    def __init__(self, start: _Optional[_Union[GenerateStart, _Mapping]] = ..., tokens: _Optional[_Union[GenerateTokens, _Mapping]] = ..., finish: _Optional[_Union[GenerateFinish, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[GeneratePromptLogprobs, _Mapping]] = ..., answer: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("at_once",)
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    at_once: bool
    def __init__(self, at_once: _Optional[bool] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("address", "hello", "load", "state", "detail", "loading_fraction")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOADING_FRACTION_FIELD_NUMBER: _ClassVar[int]
    address: str
    hello: _types_pb2.WorkerHello
    load: _types_pb2.Load
    state: str
    detail: str
    loading_fraction: float
    def __init__(self, address: _Optional[str] = ..., hello: _Optional[_Union[_types_pb2.WorkerHello, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., loading_fraction: _Optional[float] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "vocab_size", "max_context", "eos_token_ids", "default_sampling", "drafters", "default_drafter", "default_num_draft_tokens", "verification_modes", "verify_workers", "draft_workers", "has_chat_template", "version", "system_fingerprint", "sources", "tool_format", "speculation_policies", "requires_api_key", "supports_infill", "num_overlap_outcomes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_MODES_FIELD_NUMBER: _ClassVar[int]
    VERIFY_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_POLICIES_FIELD_NUMBER: _ClassVar[int]
    REQUIRES_API_KEY_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_INFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERLAP_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _types_pb2.SamplingParams
    drafters: _containers.RepeatedScalarFieldContainer[str]
    default_drafter: str
    default_num_draft_tokens: int
    verification_modes: _containers.RepeatedScalarFieldContainer[_types_pb2.VerificationMode]
    verify_workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    draft_workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    has_chat_template: bool
    version: str
    system_fingerprint: str
    sources: _containers.RepeatedCompositeFieldContainer[_types_pb2.SourceInfo]
    tool_format: ToolFormat
    speculation_policies: _containers.RepeatedCompositeFieldContainer[SpeculationPolicy]
    requires_api_key: bool
    supports_infill: bool
    num_overlap_outcomes: int
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., drafters: _Optional[_Iterable[str]] = ..., default_drafter: _Optional[str] = ..., default_num_draft_tokens: _Optional[int] = ..., verification_modes: _Optional[_Iterable[_Union[_types_pb2.VerificationMode, str]]] = ..., verify_workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., draft_workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., has_chat_template: _Optional[bool] = ..., version: _Optional[str] = ..., system_fingerprint: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[_types_pb2.SourceInfo, _Mapping]]] = ..., tool_format: _Optional[_Union[ToolFormat, _Mapping]] = ..., speculation_policies: _Optional[_Iterable[_Union[SpeculationPolicy, _Mapping]]] = ..., requires_api_key: _Optional[bool] = ..., supports_infill: _Optional[bool] = ..., num_overlap_outcomes: _Optional[int] = ...) -> None: ...

class ToolFormat(_message.Message):
    __slots__ = ("name", "mark_ids")
    class MarkIdsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MARK_IDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    mark_ids: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., mark_ids: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("prompt", "messages", "add_special_tokens")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    messages: ChatMessages
    add_special_tokens: bool
    def __init__(self, prompt: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "pieces")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    text: str
    pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, text: _Optional[str] = ..., pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...
