"""The devices of a worker's ranks, from `--device`, `--tensor-parallel` and `--pipeline`."""

MAX_RANKS = 64


def rank_devices(device: str, tensor_parallel: int, pipeline: int = 1) -> tuple[str, ...]:
    """Return the device of each rank of all stages.

    A list has one rank on each device. One device is shared by all ranks, except a GPU: it is rank 0's, and the
    following GPUs are the other ranks'.

    Raises:
        ValueError: a list that ranks cannot use; names option, value and limit.
    """
    if pipeline > 1:
        _check_stages(device, tensor_parallel, pipeline)
        return (device,) * (tensor_parallel * pipeline)
    names = tuple(name.strip() for name in device.split(","))
    if len(names) > 1:
        if fault := _fault(names, tensor_parallel):
            raise ValueError(f"--device = {device!r}: {fault}")
        return names
    kind, _, first = device.partition(":")
    if tensor_parallel == 1 or kind != "cuda" or not (first or "0").isdecimal():
        return (device,) * tensor_parallel
    return tuple(f"cuda:{int(first or 0) + rank}" for rank in range(tensor_parallel))


def _check_stages(device: str, tensor_parallel: int, pipeline: int) -> None:
    if device != "cpu":
        raise ValueError(f"--device = {device!r}: must be cpu with --pipeline = {pipeline}")
    if tensor_parallel * pipeline > MAX_RANKS:
        limit = f"must be at most {MAX_RANKS // tensor_parallel} with --tensor-parallel = {tensor_parallel}"
        raise ValueError(f"--pipeline = {pipeline}: {limit}")


def _fault(names: tuple[str, ...], tensor_parallel: int) -> str:
    kinds = {name.partition(":")[0] for name in names}
    if not all(names):
        return "an entry is empty"
    if len(names) > MAX_RANKS:
        return f"{len(names)} devices, must be at most {MAX_RANKS}"
    if tensor_parallel not in (1, len(names)):
        return f"must be {tensor_parallel} devices, or one, with --tensor-parallel = {tensor_parallel}"
    if len(kinds) > 1:
        return f"must be of one kind, not {' and '.join(sorted(kinds))}"
    if kinds != {"cpu"} and (len(set(names)) < len(names) or not all(":" in name for name in names)):
        return "must be distinct devices with their numbers, such as cuda:0,cuda:1"
    return ""
