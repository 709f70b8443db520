from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerificationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_MODE_UNSPECIFIED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_COUPLED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_REJECTION: _ClassVar[VerificationMode]
    VERIFICATION_MODE_TYPICAL: _ClassVar[VerificationMode]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_ACCEPTED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_RECOVERED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_PLAIN: _ClassVar[TokenOrigin]
VERIFICATION_MODE_UNSPECIFIED: VerificationMode
VERIFICATION_MODE_COUPLED: VerificationMode
VERIFICATION_MODE_REJECTION: VerificationMode
VERIFICATION_MODE_TYPICAL: VerificationMode
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_ACCEPTED: TokenOrigin
TOKEN_ORIGIN_RECOVERED: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin
TOKEN_ORIGIN_PLAIN: TokenOrigin

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    seed: int
    max_new_tokens: int
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SparseDistribution(_message.Message):
    __slots__ = ("token_ids", "probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("rows", "context", "ns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    context: int
    ns: int
    def __init__(self, rows: _Optional[int] = ..., context: _Optional[int] = ..., ns: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "free_pages", "total_pages", "preemptions", "tokens_per_s", "row_price", "cached_tokens", "snapshot_bytes", "step_time_ratio", "memory_documents", "memory_tokens", "memory_hits", "memory_evictions")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_RATIO_FIELD_NUMBER: _ClassVar[int]
    MEMORY_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_HITS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_pages: int
    total_pages: int
    preemptions: int
    tokens_per_s: float
    row_price: float
    cached_tokens: int
    snapshot_bytes: int
    step_time_ratio: float
    memory_documents: int
    memory_tokens: int
    memory_hits: int
    memory_evictions: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., preemptions: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., row_price: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., snapshot_bytes: _Optional[int] = ..., step_time_ratio: _Optional[float] = ..., memory_documents: _Optional[int] = ..., memory_tokens: _Optional[int] = ..., memory_hits: _Optional[int] = ..., memory_evictions: _Optional[int] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("protocol_version", "router_id")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_id: str
    def __init__(self, protocol_version: _Optional[int] = ..., router_id: _Optional[str] = ...) -> None: ...

class SourceInfo(_message.Message):
    __slots__ = ("name", "explains", "colour")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXPLAINS_FIELD_NUMBER: _ClassVar[int]
    COLOUR_FIELD_NUMBER: _ClassVar[int]
    name: str
    explains: str
    colour: str
    def __init__(self, name: _Optional[str] = ..., explains: _Optional[str] = ..., colour: _Optional[str] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_version", "role", "worker_id", "model_id", "dtype", "weights_fingerprint", "tokenizer_hash", "vocab_size", "max_context", "max_sequences", "verification_modes", "supports_trees", "tensor_parallel_degree", "step_costs", "drafters", "max_draft_tokens", "eos_token_ids", "default_sampling", "page_size", "numerics", "draft_context", "sources", "supports_constraints", "predicting_drafters", "weight_bytes", "sequence_state_bytes", "snapshot_limit_bytes", "media_token_ids", "kv_bytes", "other_bytes", "is_synthetic", "mask_token_id", "translation", "pipeline_parallel_degree")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_MODES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_TREES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_DEGREE_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTING_DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIA_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSLATION_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_DEGREE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: str
    worker_id: str
    model_id: str
    dtype: str
    weights_fingerprint: str
    tokenizer_hash: str
    vocab_size: int
    max_context: int
    max_sequences: int
    verification_modes: _containers.RepeatedScalarFieldContainer[VerificationMode]
    supports_trees: bool
    tensor_parallel_degree: int
    step_costs: _containers.RepeatedCompositeFieldContainer[StepCost]
    drafters: _containers.RepeatedScalarFieldContainer[str]
    max_draft_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: SamplingParams
    page_size: int
    numerics: str
    draft_context: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceInfo]
    supports_constraints: bool
    predicting_drafters: _containers.RepeatedScalarFieldContainer[str]
    weight_bytes: int
    sequence_state_bytes: int
    snapshot_limit_bytes: int
    media_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_bytes: int
    other_bytes: int
    is_synthetic: bool
    mask_token_id: int
    translation: DraftTranslation
    pipeline_parallel_degree: int
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[str] = ..., worker_id: _Optional[str] = ..., model_id: _Optional[str] = ..., dtype: _Optional[str] = ..., weights_fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., max_sequences: _Optional[int] = ..., verification_modes: _Optional[_Iterable[_Union[VerificationMode, str]]] = ..., supports_trees: _Optional[bool] = ..., tensor_parallel_degree: _Optional[int] = ..., step_costs: _Optional[_Iterable[_Union[StepCost, _Mapping]]] = ..., drafters: _Optional[_Iterable[str]] = ..., max_draft_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., page_size: _Optional[int] = ..., numerics: _Optional[str] = ..., draft_context: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceInfo, _Mapping]]] = ..., supports_constraints: _Optional[bool] = ..., predicting_drafters: _Optional[_Iterable[str]] = ..., weight_bytes: _Optional[int] = ..., sequence_state_bytes: _Optional[int] = ..., snapshot_limit_bytes: _Optional[int] = ..., media_token_ids: _Optional[_Iterable[int]] = ..., kv_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., is_synthetic: _Optional[bool] = ..., mask_token_id: _Optional[int] = ..., translation: _Optional[_Union[DraftTranslation, _Mapping]] = ..., pipeline_parallel_degree: _Optional[int] = ...) -> None: ...

class DraftTranslation(_message.Message):
    __slots__ = ("is_by_token", "coverage")
    IS_BY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    is_by_token: bool
    coverage: float
    def __init__(self, is_by_token: _Optional[bool] = ..., coverage: _Optional[float] = ...) -> None: ...

class LinkError(_message.Message):
    __slots__ = ("sequence_id", "code", "message")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    code: int
    message: str
    def __init__(self, sequence_id: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("sequence_id", "prompt_ids", "committed_ids", "sampling", "mode", "eos_token_ids", "max_length", "traceparent", "deadline_ms", "drafter", "constraint", "predicted_ids", "posterior_threshold", "posterior_alpha", "num_prompt_logprobs_sent", "tenant_hash")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_IDS_FIELD_NUMBER: _ClassVar[int]
    POSTERIOR_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    POSTERIOR_ALPHA_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_SENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_HASH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    mode: VerificationMode
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_length: int
    traceparent: str
    deadline_ms: int
    drafter: DrafterChoice
    constraint: Constraint
    predicted_ids: _containers.RepeatedScalarFieldContainer[int]
    posterior_threshold: float
    posterior_alpha: float
    num_prompt_logprobs_sent: int
    tenant_hash: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., mode: _Optional[_Union[VerificationMode, str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_length: _Optional[int] = ..., traceparent: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., drafter: _Optional[_Union[DrafterChoice, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., predicted_ids: _Optional[_Iterable[int]] = ..., posterior_threshold: _Optional[float] = ..., posterior_alpha: _Optional[float] = ..., num_prompt_logprobs_sent: _Optional[int] = ..., tenant_hash: _Optional[bytes] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_object", "json_schema", "regex", "choice", "lark")
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_object: bool
    json_schema: str
    regex: str
    choice: Choices
    lark: str
    def __init__(self, json_object: _Optional[bool] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., lark: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class DrafterChoice(_message.Message):
    __slots__ = ("name", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    settings: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CloseSequence(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "is_refusal")
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    is_refusal: bool
    def __init__(self, reason: _Optional[str] = ..., is_refusal: _Optional[bool] = ...) -> None: ...
