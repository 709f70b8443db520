"""The machine around a model: ports, shared memory and waking of cores. It knows no tensors."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from betoken.common.errors import FailedPreconditionError
from betoken.rpc.fast_wake import FastWake
from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

_SHM = Path("/dev/shm")
_SHM_BYTES_PER_RANK = 512 << 20
"""NCCL keeps its buffers there, tens of megabytes per channel; Docker gives a container 64 MB."""


def ports_finding(host: str, ports: Sequence[int]) -> Finding:
    """Listen on each port for a moment."""
    faults = [f"{port}: {reason}" for port in ports if (reason := _port_fault(host, port))]
    if faults:
        return error(
            "ports",
            f"{host}, {'; '.join(faults)}",
            "end the process that uses the port (`ss -ltnp`), or choose another port",
        )
    return ok("ports", f"{host}: {', '.join(map(str, ports))} free")


def _port_fault(host: str, port: int) -> str:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as fault:
        return fault.strerror or str(fault)
    return ""


def shared_memory_finding(num_ranks: int, on_gpu: bool, folder: Path = _SHM, free_bytes: int | None = None) -> Finding:
    """Compare the free bytes of /dev/shm with what NCCL needs; ranks on CPUs exchange through sockets.

    Args:
        free_bytes: None = free bytes of the folder's file system.
    """
    needed = num_ranks * _SHM_BYTES_PER_RANK if on_gpu and num_ranks > 1 else 0
    name = "shared memory"
    if free_bytes is None:
        try:
            state = os.statvfs(folder)
        except OSError as fault:
            return (error if needed else warning)(name, str(fault), "mount a tmpfs there")
        free_bytes = state.f_bavail * state.f_frsize
    found = f"{folder}: {_mib(free_bytes)} free"
    if free_bytes >= needed:
        return ok(name, found if needed else f"{found}, none needed")
    size = f"{needed >> 20}m"
    cure = f"Docker: --shm-size {size}, or shm_size of the service; Kubernetes: an emptyDir with medium: Memory"
    return error(name, f"{found}, NCCL needs {_mib(needed)}", cure)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"


def fast_wake_finding(device: Path | None = None) -> Finding:
    """Find out whether a service may keep idle cores awake."""
    try:
        FastWake("on", device)
    except FailedPreconditionError as fault:
        cure = (
            "let the service write /dev/cpu_dma_latency (a container: `devices: [/dev/cpu_dma_latency]`, as root),"
            " or accept longer rounds"
        )
        return warning("fast wake", fault.message.removeprefix("--fast-wake on: "), cure)
    return ok("fast wake", "idle cores can be kept awake")
