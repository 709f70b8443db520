"""A worker's handshake from the description of its model. Knows the description's fields, not who made it."""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from betoken.v1.types_pb2 import SamplingParams, WorkerHello

_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "min_new_tokens")


class ModelDescription(Protocol):
    """A loaded model's description from `betoken.engine`."""

    @property
    def model_id(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def default_sampling(self) -> dict[str, Any]: ...
    @property
    def weights_fingerprint(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...


class MeasuredCost(Protocol):
    """One measured step time."""

    @property
    def rows(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def ns(self) -> int: ...


def worker_hello(
    role: str,
    worker_id: str,
    model: ModelDescription | None,
    step_costs: Sequence[MeasuredCost] = (),
    **fields: Any,
) -> WorkerHello:
    """The hello of a worker; `fields` are further fields of the message. `model` None: the worker runs without a
    model."""
    fields = {"tensor_parallel_degree": 1} | fields
    hello = WorkerHello(role=role, worker_id=worker_id or default_worker_id(role), **fields)
    for cost in step_costs:
        hello.step_costs.add(rows=cost.rows, context=cost.context, ns=cost.ns)
    if model is not None:
        hello.model_id = model.model_id
        hello.dtype = model.dtype
        hello.vocab_size = model.vocab_size
        hello.max_context = model.max_context
        hello.eos_token_ids.extend(model.eos_token_ids)
        hello.weights_fingerprint = model.weights_fingerprint
        hello.tokenizer_hash = model.tokenizer_hash
        hello.default_sampling.CopyFrom(default_sampling(model.default_sampling))
    return hello


def default_sampling(config: Mapping[str, Any]) -> SamplingParams:
    """The sampling fields of a generation_config.json; `do_sample: false` is temperature 0."""
    params = SamplingParams()
    for name in _SAMPLING_FIELDS:
        if config.get(name) is not None:
            setattr(params, name, config[name])
    if config.get("do_sample") is False:
        params.temperature = 0.0
    return params


def default_worker_id(role: str) -> str:
    """A name that is unique per process start on one machine: role, host, process id."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"
