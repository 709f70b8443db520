"""The devices of a worker's ranks, from `--device`, `--tensor-parallel` and `--pipeline`."""

MAX_RANKS = 64


def rank_devices(device: str, tensor_parallel: int, pipeline: int = 1) -> tuple[str, ...]:
    """Return the device of each rank of all stages.

    A list has one rank on each device. One device is shared by all ranks, except a GPU: it is rank 0's, and the
    following GPUs are the other ranks'.

    Raises:
        ValueError: a list that ranks cannot use, or too many ranks; names option, value and limit.
    """
    num_ranks = tensor_parallel * pipeline
    if num_ranks > MAX_RANKS:
        limit = f"must be at most {MAX_RANKS // tensor_parallel} with --tensor-parallel = {tensor_parallel}"
        raise ValueError(f"--pipeline = {pipeline}: {limit}")
    names = tuple(name.strip() for name in device.split(","))
    if len(names) > 1:
        if fault := _fault(names, tensor_parallel, pipeline):
            raise ValueError(f"--device = {device!r}: {fault}")
        return names
    kind, _, first = device.partition(":")
    if num_ranks == 1 or kind != "cuda" or not (first or "0").isdecimal():
        return (device,) * num_ranks
    return tuple(f"cuda:{int(first or 0) + rank}" for rank in range(num_ranks))


def _fault(names: tuple[str, ...], tensor_parallel: int, pipeline: int) -> str:
    kinds = {name.partition(":")[0] for name in names}
    if not all(names):
        return "an entry is empty"
    if len(names) > MAX_RANKS:
        return f"{len(names)} devices, must be at most {MAX_RANKS}"
    if len(names) % pipeline:
        return f"{len(names)} devices, must be a multiple of --pipeline = {pipeline}"
    if tensor_parallel not in (1, len(names) // pipeline):
        needs = f"--tensor-parallel = {tensor_parallel}" + (f" and --pipeline = {pipeline}" if pipeline > 1 else "")
        return f"must be {tensor_parallel * pipeline} devices, or one, with {needs}"
    if len(kinds) > 1:
        return f"must be of one kind, not {' and '.join(sorted(kinds))}"
    if kinds != {"cpu"} and (len(set(names)) < len(names) or not all(":" in name for name in names)):
        return "must be distinct devices with their numbers, such as cuda:0,cuda:1"
    return ""
