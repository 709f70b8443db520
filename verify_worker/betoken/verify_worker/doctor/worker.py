"""The checks that import torch: devices, compilers, memory of the models, and the exchange between ranks."""

from contextlib import suppress

import torch

from betoken.common.economy.model_shape import read_sizes
from betoken.common.errors import InvalidArgumentError
from betoken.engine.errors import ModelRefusedError
from betoken.kernels import cpu, native
from betoken.verify_worker.doctor.code import code_cache_finding, compiler_finding
from betoken.verify_worker.doctor.devices import Gpu, device_finding, gpus, peer_access_finding, peer_pairs
from betoken.verify_worker.doctor.finding import Finding, error
from betoken.verify_worker.doctor.gather import MAX_WIDTH, gather_finding, stages_finding
from betoken.verify_worker.doctor.machine import shared_memory_finding
from betoken.verify_worker.doctor.memory import (
    cpu_memory_finding,
    free_memory_bytes,
    gpu_memory_finding,
    model_finding,
    rank_bytes,
    stage_bytes,
)
from betoken.verify_worker.doctor.options import DoctorOptions

_ASSUMED_WIDTH = 4096


def worker_findings(options: DoctorOptions) -> list[Finding]:
    """Run the checks of a worker's device and models."""
    found, columns, stages = gpus(), options.tensor_parallel, options.pipeline
    device, ranks = options.device or ("cuda:0" if found else "cpu"), columns * stages
    on_gpu, local_ranks = device.startswith("cuda"), options.local_ranks or ranks
    devices = device_finding(device, local_ranks, found)
    has_devices = devices.level == "ok"
    checks = [devices]
    if on_gpu and has_devices and local_ranks > 1:
        checks.append(peer_access_finding(peer_pairs(torch.device(device).index or 0, local_ranks)))
    checks.append(shared_memory_finding(local_ranks, on_gpu))
    checks += [compiler_finding(cpu.LIBRARY, ranks > 1), compiler_finding(native.LIBRARY, False)]
    checks.append(code_cache_finding(options.cache_dir))
    if options.model is not None:
        checks += _memory_findings(options, options.model, device, found if has_devices else [])
    if columns > 1 and has_devices:
        checks.append(gather_finding(columns, device, options.timeout_s))
    if stages > 1 and has_devices and (local_ranks == ranks or not on_gpu):
        checks.append(stages_finding(device, columns, stages, _width(options.model), options.timeout_s))
    return checks


def _width(model: str | None) -> int:
    """Width of a model's hidden states, or an assumed one if it is unknown."""
    width = None
    if model is not None:
        with suppress(InvalidArgumentError):  # another finding says so
            width = read_sizes(model).get("hidden_size")
    return width if type(width) is int and 0 < width <= MAX_WIDTH else _ASSUMED_WIDTH


def _memory_findings(options: DoctorOptions, model: str, device: str, found: list[Gpu]) -> list[Finding]:
    target, target_bytes = model_finding("model", model, options.dtype)
    checks, draft_bytes = [target], 0
    if options.draft is not None:
        draft, draft_bytes = model_finding("draft model", options.draft, options.dtype)
        checks.append(draft)
    if not target_bytes:
        return checks
    free, on_gpu = free_memory_bytes(), device.startswith("cuda")
    is_known = bool(found) if on_gpu else free is not None
    if not is_known:
        return checks
    num_ranks = options.tensor_parallel * options.pipeline
    try:
        staged = options.pipeline > 1
        stages = stage_bytes(model, options.dtype, options.pipeline) if staged else [target_bytes]
    except (InvalidArgumentError, ModelRefusedError) as fault:
        cure = "a smaller --pipeline, or a model with as many layers as stages"
        return [*checks, error("memory", str(fault), cure)]
    ranks = rank_bytes(stages, options.tensor_parallel, options.local_ranks or num_ranks)
    if on_gpu:
        first = torch.device(device).index or 0
        free_bytes = [gpu.free_bytes for gpu in found[first : first + len(ranks)]]
        return [*checks, gpu_memory_finding(ranks, draft_bytes, free_bytes)]
    return [*checks, cpu_memory_finding(ranks, draft_bytes, options.kv_memory_bytes, free or 0)]
