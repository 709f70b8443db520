from betoken.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Commit(_message.Message):
    __slots__ = ("sequence_id", "base_length", "ids")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("sequence_id", "num_tokens", "takes_trees", "terms", "base_length", "next_id", "num_outcomes")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKES_TREES_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    num_tokens: int
    takes_trees: bool
    terms: DraftTerms
    base_length: int
    next_id: int
    num_outcomes: int
    def __init__(self, sequence_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., takes_trees: _Optional[bool] = ..., terms: _Optional[_Union[DraftTerms, _Mapping]] = ..., base_length: _Optional[int] = ..., next_id: _Optional[int] = ..., num_outcomes: _Optional[int] = ...) -> None: ...

class DraftTerms(_message.Message):
    __slots__ = ("max_tokens", "row_price", "min_gain")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_FIELD_NUMBER: _ClassVar[int]
    MIN_GAIN_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    row_price: float
    min_gain: float
    def __init__(self, max_tokens: _Optional[int] = ..., row_price: _Optional[float] = ..., min_gain: _Optional[float] = ...) -> None: ...

class DraftedBlock(_message.Message):
    __slots__ = ("sequence_id", "base_length", "ids", "parents", "draft_probs", "queue_ns", "forward_ns", "num_forwards", "sources", "next_id", "num_ahead_ids", "num_ahead_tokens", "is_ahead")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    base_length: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    draft_probs: _containers.RepeatedCompositeFieldContainer[_types_pb2.SparseDistribution]
    queue_ns: int
    forward_ns: int
    num_forwards: int
    sources: _containers.RepeatedScalarFieldContainer[str]
    next_id: int
    num_ahead_ids: int
    num_ahead_tokens: int
    is_ahead: bool
    def __init__(self, sequence_id: _Optional[int] = ..., base_length: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., draft_probs: _Optional[_Iterable[_Union[_types_pb2.SparseDistribution, _Mapping]]] = ..., queue_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., num_forwards: _Optional[int] = ..., sources: _Optional[_Iterable[str]] = ..., next_id: _Optional[int] = ..., num_ahead_ids: _Optional[int] = ..., num_ahead_tokens: _Optional[int] = ..., is_ahead: _Optional[bool] = ...) -> None: ...

class DraftLinkRequest(_message.Message):
    __slots__ = ("hello", "opens", "commits", "requests", "closes", "drain")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.RouterHello
    opens: _containers.RepeatedCompositeFieldContainer[_types_pb2.OpenSequence]
    commits: _containers.RepeatedCompositeFieldContainer[Commit]
    requests: _containers.RepeatedCompositeFieldContainer[DraftRequest]
    closes: _containers.RepeatedCompositeFieldContainer[_types_pb2.CloseSequence]
    drain: _types_pb2.Drain
    def __init__(self, hello: _Optional[_Union[_types_pb2.RouterHello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[_types_pb2.OpenSequence, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[Commit, _Mapping]]] = ..., requests: _Optional[_Iterable[_Union[DraftRequest, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[_types_pb2.CloseSequence, _Mapping]]] = ..., drain: _Optional[_Union[_types_pb2.Drain, _Mapping]] = ...) -> None: ...

class DraftLinkResponse(_message.Message):
    __slots__ = ("hello", "blocks", "errors", "load", "drain", "pending_ids")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PENDING_IDS_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.WorkerHello
    blocks: _containers.RepeatedCompositeFieldContainer[DraftedBlock]
    errors: _containers.RepeatedCompositeFieldContainer[_types_pb2.LinkError]
    load: _types_pb2.Load
    drain: _types_pb2.Drain
    pending_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[_types_pb2.WorkerHello, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[DraftedBlock, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[_types_pb2.LinkError, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ..., drain: _Optional[_Union[_types_pb2.Drain, _Mapping]] = ..., pending_ids: _Optional[_Iterable[int]] = ...) -> None: ...
