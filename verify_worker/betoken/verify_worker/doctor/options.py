"""The deployment that `betoken doctor` checks a machine for: models, ranks and ports."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Values of the command's options."""

    model: str | None = None
    """Target: a directory in Hugging Face format or a GGUF file."""
    draft: str | None = None
    """Draft model, likewise."""
    tensor_parallel: int = 1
    """Processes that share the columns of the target's layers."""
    pipeline: int = 1
    """Stages of so many processes each that divide the target's layers."""
    local_ranks: int | None = None
    """Processes of the target on this machine; None = all."""
    rendezvous: tuple[str, int] | None = None
    """Host and port at which ranks of several machines meet."""
    device: str | None = None
    """Torch device of rank 0; None = the first GPU, or the CPU of a machine without one."""
    dtype: str = "bfloat16"
    """Type of dense weights, a name of torch's, or `auto` = the checkpoint's own."""
    kv_memory_bytes: int = 1 << 30
    """Memory of each rank for KV pages on a CPU."""
    host: str = "127.0.0.1"
    """Address that the services listen on."""
    ports: tuple[int, ...] = ()
    """Ports that services listen on."""
    cache_dir: str | None = None
    """Folder for compiled code; None = the user's cache directory."""
    timeout_s: float = 60.0
    """Longest time of the exchange between ranks."""
