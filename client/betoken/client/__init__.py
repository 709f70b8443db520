"""The Betoken SDK: `Client` and `AsyncClient` of a router, over gRPC.

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("def fibonacci(n):", max_new_tokens=64):
            print(piece, end="", flush=True)

Knows the router's public service only; needs grpcio, protobuf and opentelemetry-api.
"""

from betoken.client.async_client import AsyncClient
from betoken.client.async_generation import AsyncGeneration
from betoken.client.completion import Completion, Detokenized, FinishReason, PartialAnswer, SpeculationStats, Usage
from betoken.client.config import (
    Constraint,
    GenerateOptions,
    PromptOptions,
    RetryPolicy,
    Sampling,
    Speculation,
    VerificationMode,
)
from betoken.client.model_info import DraftTranslation, ModelInfo, SourceInfo, StepCost, ToolFormat, WorkerStatus
from betoken.client.piece import Logprobs, Piece, RoundTimes, Token, TokenOrigin
from betoken.client.request import ChatMessage, Prompt
from betoken.client.speculation_policy import SpeculationPolicy
from betoken.client.sync_client import Client
from betoken.client.sync_generation import Generation
from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LoadingError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from betoken.common.release import __version__
from betoken.common.tls import ClientTls

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "ChatMessage",
    "Client",
    "ClientTls",
    "Completion",
    "Constraint",
    "DeadlineExceededError",
    "Detokenized",
    "DraftTranslation",
    "FailedPreconditionError",
    "FinishReason",
    "BetokenError",
    "GenerateOptions",
    "Generation",
    "InternalError",
    "InvalidArgumentError",
    "LoadingError",
    "Logprobs",
    "ModelInfo",
    "NotFoundError",
    "PartialAnswer",
    "PermissionDeniedError",
    "Piece",
    "Prompt",
    "PromptOptions",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "RoundTimes",
    "Sampling",
    "Speculation",
    "SourceInfo",
    "SpeculationPolicy",
    "SpeculationStats",
    "StepCost",
    "Token",
    "ToolFormat",
    "TokenOrigin",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "VerificationMode",
    "WorkerStatus",
    "__version__",
]
