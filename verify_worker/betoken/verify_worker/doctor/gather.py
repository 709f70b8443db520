"""A gather of 1 MiB between ranks, made by processes that end in bounded time.

Rank 0 is a child process, too: an exchange that hangs cannot be interrupted in its own process.
"""

import json
import subprocess
import sys

from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

GATHER_BYTES = 1 << 20
_MODULE = "betoken.verify_worker.doctor.gather_ranks"
_SLOW_S = {"cpu": 20e-3, "cuda": 2e-3}
_CPU_CURE = "free cores for the ranks; check the loopback interface, and GLOO_SOCKET_IFNAME if it is set"
_GPU_CURE = (
    "check `nvidia-smi topo -m` and /dev/shm; NCCL_DEBUG=INFO shows the transport; if it hangs: NCCL_P2P_DISABLE=1"
)


def gather_finding(num_ranks: int, device: str, timeout_s: float) -> Finding:
    """Run a gather between so many ranks and report its time."""
    command = [sys.executable, "-m", _MODULE, "lead", device, str(num_ranks)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return gather_result(num_ranks, device, {"error": f"no result within {timeout_s:g} s"})
    try:
        result = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines()[-1:] or [f"ended with status {done.returncode}"]
        result = {"error": words[0]}
    return gather_result(num_ranks, device, result)


def gather_result(num_ranks: int, device: str, result: dict[str, float | str]) -> Finding:
    """Return the finding for a time (`seconds`) or a failure (`error`)."""
    kind = device.partition(":")[0]
    name, cure = f"gather of {num_ranks} ranks", _CPU_CURE if kind == "cpu" else _GPU_CURE
    backend = "gloo" if kind == "cpu" else "NCCL"
    if "seconds" not in result:
        return error(name, f"{backend}: {result['error']}", cure)
    seconds = float(result["seconds"])
    found = f"{backend}: 1 MiB in {seconds * 1e3:.2f} ms"
    return warning(name, f"{found}, which is slow", cure) if seconds > _SLOW_S[kind] else ok(name, found)
