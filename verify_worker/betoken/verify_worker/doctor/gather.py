"""A gather of 1 MiB between ranks, and hidden states through stages, sent by processes that end in bounded time.

Rank 0 is a child process, too: an exchange that hangs cannot be interrupted in its own process.
"""

import json
import subprocess
import sys

from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

GATHER_BYTES = 1 << 20
STATE_TOKENS = (1, 256)
"""Tokens whose hidden states pass the stages: of a decode step, and of a part of a prompt."""
MAX_WIDTH = 1 << 20
_MODULE = "betoken.verify_worker.doctor.gather_ranks"
_SLOW_S = {"cpu": 20e-3, "cuda": 2e-3}
_CPU_CURE = "free cores for the ranks; check the loopback interface, and GLOO_SOCKET_IFNAME if it is set"
_GPU_CURE = (
    "check `nvidia-smi topo -m` and /dev/shm; NCCL_DEBUG=INFO shows the transport; if it hangs: NCCL_P2P_DISABLE=1"
)


def gather_finding(num_ranks: int, device: str, timeout_s: float) -> Finding:
    """Run a gather between so many ranks and report its time."""
    return gather_result(num_ranks, device, _run([device, str(num_ranks), "1", "0"], timeout_s))


def stages_finding(device: str, num_columns: int, num_stages: int, width: int, timeout_s: float) -> Finding:
    """Send hidden states of this width through all stages and report the times."""
    result = _run([device, str(num_columns * num_stages), str(num_stages), str(width)], timeout_s)
    name = f"hidden states of {num_stages} stages"
    kind, cure, backend = _backend(device)
    if "error" in result:
        return error(name, f"{backend}: {result['error']}", cure)
    seconds = [float(result["token_seconds"]), float(result["seconds"])]
    parts = [
        f"{count} token{'s' if count > 1 else ''}, {2 * width * count:,} bytes, in {each * 1e3:.2f} ms"
        for count, each in zip(STATE_TOKENS, seconds, strict=True)
    ]
    found = f"{backend} on this machine: {'; '.join(parts)}"
    is_slow = max(seconds) > _SLOW_S[kind] * num_stages
    return warning(name, f"{found}, which is slow", cure) if is_slow else ok(name, found)


def _backend(device: str) -> tuple[str, str, str]:
    """Kind of a device, the cure of its exchanges, and their backend."""
    kind = device.partition(":")[0]
    return (kind, _CPU_CURE, "gloo") if kind == "cpu" else (kind, _GPU_CURE, "NCCL")


def _run(arguments: list[str], timeout_s: float) -> dict[str, float | str]:
    """Return the times of the ranks' exchange, or `error`."""
    command = [sys.executable, "-m", _MODULE, "lead", *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout_s:g} s"}
    try:
        result: dict[str, float | str] = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
        return {"error": words[0]}
    return result


def gather_result(num_ranks: int, device: str, result: dict[str, float | str]) -> Finding:
    """Return the finding for a time (`seconds`) or a failure (`error`)."""
    name, (kind, cure, backend) = f"gather of {num_ranks} ranks", _backend(device)
    if "seconds" not in result:
        return error(name, f"{backend}: {result['error']}", cure)
    seconds = float(result["seconds"])
    found = f"{backend}: 1 MiB in {seconds * 1e3:.2f} ms"
    return warning(name, f"{found}, which is slow", cure) if seconds > _SLOW_S[kind] else ok(name, found)
