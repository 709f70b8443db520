"""The checks that import torch: devices, compilers, memory of the models, and the exchange between ranks."""

import torch

from betoken.kernels import cpu, native
from betoken.verify_worker.doctor.code import code_cache_finding, compiler_finding
from betoken.verify_worker.doctor.devices import Gpu, device_finding, gpus, peer_access_finding, peer_pairs
from betoken.verify_worker.doctor.finding import Finding
from betoken.verify_worker.doctor.gather import gather_finding
from betoken.verify_worker.doctor.machine import shared_memory_finding
from betoken.verify_worker.doctor.memory import (
    cpu_memory_finding,
    free_memory_bytes,
    gpu_memory_finding,
    model_finding,
)
from betoken.verify_worker.doctor.options import DoctorOptions


def worker_findings(options: DoctorOptions) -> list[Finding]:
    """Run the checks of a worker's device and models."""
    found, ranks = gpus(), options.tensor_parallel
    device = options.device or ("cuda:0" if found else "cpu")
    on_gpu = device.startswith("cuda")
    devices = device_finding(device, ranks, found)
    has_devices = devices.level == "ok"
    checks = [devices]
    if on_gpu and has_devices and ranks > 1:
        checks.append(peer_access_finding(peer_pairs(torch.device(device).index or 0, ranks)))
    checks.append(shared_memory_finding(ranks, on_gpu))
    checks += [compiler_finding(cpu.LIBRARY, ranks > 1), compiler_finding(native.LIBRARY, False)]
    checks.append(code_cache_finding(options.cache_dir))
    if options.model is not None:
        checks += _memory_findings(options, options.model, device, found if has_devices else [])
    if ranks > 1 and has_devices:
        checks.append(gather_finding(ranks, device, options.timeout_s))
    return checks


def _memory_findings(options: DoctorOptions, model: str, device: str, found: list[Gpu]) -> list[Finding]:
    target, target_bytes = model_finding("model", model, options.dtype)
    checks, draft_bytes = [target], 0
    if options.draft is not None:
        draft, draft_bytes = model_finding("draft model", options.draft, options.dtype)
        checks.append(draft)
    if not target_bytes:
        return checks
    if not device.startswith("cuda"):
        free = free_memory_bytes()
        if free is not None:
            checks.append(
                cpu_memory_finding(target_bytes, draft_bytes, options.tensor_parallel, options.kv_memory_bytes, free)
            )
    elif found:
        first = torch.device(device).index or 0
        free_bytes = [gpu.free_bytes for gpu in found[first : first + options.tensor_parallel]]
        checks.append(gpu_memory_finding(target_bytes, draft_bytes, free_bytes))
    return checks
