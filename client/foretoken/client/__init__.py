"""The Foretoken SDK: `Client` and `AsyncClient` of a router, over gRPC.

    with Client("127.0.0.1:50051") as client:
        for piece in client.generate("def fibonacci(n):", max_new_tokens=64):
            print(piece, end="", flush=True)

Knows the router's public service only; needs grpcio, protobuf and opentelemetry-api.
"""

from foretoken.client.async_client import AsyncClient, AsyncGeneration
from foretoken.client.completion import Completion, FinishReason, SpeculationStats, Usage
from foretoken.client.config import GenerateOptions, RetryPolicy, Sampling, Speculation, VerificationMode
from foretoken.client.model_info import ModelInfo, StepCost, WorkerStatus
from foretoken.client.piece import DraftSource, Logprobs, Piece, Token, TokenOrigin
from foretoken.client.request import ChatMessage, Prompt
from foretoken.client.sync_client import Client, Generation
from foretoken.rpc.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    ForetokenError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from foretoken.rpc.tls import ClientTls

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "ChatMessage",
    "Client",
    "ClientTls",
    "Completion",
    "DeadlineExceededError",
    "DraftSource",
    "FailedPreconditionError",
    "FinishReason",
    "ForetokenError",
    "GenerateOptions",
    "Generation",
    "InternalError",
    "InvalidArgumentError",
    "Logprobs",
    "ModelInfo",
    "NotFoundError",
    "PermissionDeniedError",
    "Piece",
    "Prompt",
    "RequestCancelledError",
    "ResourceExhaustedError",
    "RetryPolicy",
    "Sampling",
    "Speculation",
    "SpeculationStats",
    "StepCost",
    "Token",
    "TokenOrigin",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "Usage",
    "VerificationMode",
    "WorkerStatus",
]
