"""Environment variables that change how ranks exchange and how models compute. It reads only the given mapping."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from betoken.verify_worker.doctor.finding import Finding, Level, ok

_OFF = ("", "0", "false", "off", "no")


class Trap(NamedTuple):
    """A variable that is easily left set."""

    variable: str
    level: Level
    effect: str
    cure: str = "unset it"
    is_harmless: Callable[[str], bool] = lambda value: value.lower() in _OFF


TRAPS = (
    Trap("NCCL_P2P_DISABLE", "warning", "GPUs exchange through host memory", "unset it unless gathers hang without it"),
    Trap("NCCL_SHM_DISABLE", "warning", "GPUs exchange through sockets", "unset it and give /dev/shm its size"),
    Trap("CUDA_LAUNCH_BLOCKING", "warning", "each CUDA kernel is waited for"),
    Trap(
        "CUDA_VISIBLE_DEVICES",
        "warning",
        "GPUs are hidden",
        "unset it or name GPUs",
        lambda value: value not in ("", "-1"),
    ),
    Trap("TRITON_INTERPRET", "error", "Triton kernels are interpreted"),
    Trap("TORCHDYNAMO_DISABLE", "warning", "models are not compiled"),
    Trap("TORCH_COMPILE_DISABLE", "warning", "models are not compiled"),
    Trap("BETOKEN_CPU_ISA", "warning", "CPU kernels are limited", is_harmless=lambda value: value in ("", "native")),
    Trap(
        "OMP_NUM_THREADS",
        "warning",
        "replaces the default of --threads, which ranks divide",
        "unset it and set --threads",
        lambda value: value == "",
    ),
)
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment_findings(environment: Mapping[str, str], interfaces: Sequence[str]) -> list[Finding]:
    """Return a finding for each variable with a harmful value, or a single ok finding.

    Args:
        interfaces: names of this machine's network interfaces.
    """
    found = [
        Finding(trap.variable, trap.level, f"= {environment[trap.variable]!r}: {trap.effect}", trap.cure)
        for trap in TRAPS
        if trap.variable in environment and not trap.is_harmless(environment[trap.variable])
    ]
    for variable in _INTERFACES:
        value = environment.get(variable, "")
        if value and not _names_one(value, interfaces, is_exact=variable.startswith("GLOO")):
            text = f"= {value!r}: not an interface of this machine: {', '.join(interfaces)}"
            found.append(Finding(variable, "error", text, "unset it or name one of these"))
    return found or [ok("environment", f"{', '.join(_INTERFACES)} and {len(TRAPS)} others: no trap is set")]


def _names_one(value: str, interfaces: Sequence[str], *, is_exact: bool) -> bool:
    """Whether a variable selects any interface.

    NCCL takes prefixes, `=` before exact names, and `^` before excluded ones.
    """
    if is_exact:
        return value in interfaces
    is_excluding, names = value.startswith("^"), value.lstrip("^").split(",")
    if names[0].startswith("="):
        names[0] = names[0][1:]
        matches = [name in names for name in interfaces]
    else:
        matches = [any(name.startswith(prefix) for prefix in names) for name in interfaces]
    return any(match != is_excluding for match in matches)
