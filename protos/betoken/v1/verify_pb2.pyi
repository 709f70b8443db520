from betoken.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftBlock(_message.Message):
    __slots__ = ("sequence_id", "base_length", "draft_ids", "parents", "draft_probs", "num_plain_steps", "num_draft_tokens", "is_priced", "drafter")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_PRICED_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.SparseDistribution]
    num_plain_steps: int
    num_draft_tokens: int
    is_priced: bool
    drafter: str
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., draft_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.SparseDistribution, _Mapping]]] = ..., num_plain_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., is_priced: _Optional[bool] = ..., drafter: _Optional[str] = ...) -> None: ...

class AttachedDraft(_message.Message):
    __slots__ = ("accepted_ids", "sources", "depth", "is_exhausted", "forward_ns", "num_forwards", "is_failed", "num_predicted_tokens")
    ACCEPTED_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    IS_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    IS_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    accepted_ids: _containers.RepeatedScalarFieldContainer[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    depth: int
    is_exhausted: bool
    forward_ns: int
    num_forwards: int
    is_failed: bool
    num_predicted_tokens: int
    def __init__(self, accepted_ids: _Optional[_Iterable[int]] = ..., sources: _Optional[_Iterable[str]] = ..., depth: _Optional[int] = ..., is_exhausted: _Optional[bool] = ..., forward_ns: _Optional[int] = ..., num_forwards: _Optional[int] = ..., is_failed: _Optional[bool] = ..., num_predicted_tokens: _Optional[int] = ...) -> None: ...

class VerificationResult(_message.Message):
    __slots__ = ("sequence_id", "base_length", "num_accepted", "path", "next_id", "logprobs", "queue_ns", "forward_ns", "num_draft_tokens", "cached_tokens", "attached")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    num_accepted: int
    path: _containers.RepeatedScalarFieldContainer[int]
    next_id: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    queue_ns: int
    forward_ns: int
    num_draft_tokens: int
    cached_tokens: int
    attached: AttachedDraft
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., num_accepted: _Optional[int] = ..., path: _Optional[_Iterable[int]] = ..., next_id: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., attached: _Optional[_Union[AttachedDraft, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("sequence_id", "first_position", "logprobs")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    first_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, sequence_id: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Stale(_message.Message):
    __slots__ = ("sequence_id", "length")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    length: int
    def __init__(self, sequence_id: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class VerifyLinkRequest(_message.Message):
    __slots__ = ("hello", "opens", "blocks", "closes", "drain")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.RouterHello
    opens: _containers.RepeatedCompositeFieldContainer[_types_pb2.OpenSequence]
    blocks: _containers.RepeatedCompositeFieldContainer[DraftBlock]
    closes: _containers.RepeatedCompositeFieldContainer[_types_pb2.CloseSequence]
    drain: _types_pb2.Drain
    def __init__(self, hello: _Optional[_Union[_types_pb2.RouterHello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[_types_pb2.OpenSequence, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[DraftBlock, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[_types_pb2.CloseSequence, _Mapping]]] = ..., drain: _Optional[_Union[_types_pb2.Drain, _Mapping]] = ...) -> None: ...

class VerifyLinkResponse(_message.Message):
    __slots__ = ("hello", "results", "stales", "errors", "load", "drain", "pending_ids", "prompt_logprobs")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    STALES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PENDING_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.WorkerHello
    results: _containers.RepeatedCompositeFieldContainer[VerificationResult]
    stales: _containers.RepeatedCompositeFieldContainer[Stale]
    errors: _containers.RepeatedCompositeFieldContainer[_types_pb2.LinkError]
    load: _types_pb2.Load
    drain: _types_pb2.Drain
    pending_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, hello: _Optional[_Union[_types_pb2.WorkerHello, _Mapping]] = ..., results: _Optional[_Iterable[_Union[VerificationResult, _Mapping]]] = ..., stales: _Optional[_Iterable[_Union[Stale, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_types_pb2.LinkError, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ..., drain: _Optional[_Union[_types_pb2.Drain, _Mapping]] = ..., pending_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...
