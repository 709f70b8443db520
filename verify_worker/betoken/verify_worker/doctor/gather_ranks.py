"""`python -m betoken.verify_worker.doctor.gather_ranks`: the ranks of an exchange, joined as a verify worker's are.

Rank 0 (`lead DEVICE SIZE STAGES WIDTH`) starts the others (`follow DEVICE PID STAGES WIDTH`) and writes one JSON
object: `seconds` of a gather, or of hidden states through several stages, or `error`.
"""

import json
import os
import sys
import time
from statistics import median

import numpy as np
import torch

from betoken.engine.errors import RankLostError
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.joining import join, place_in_environment, store_in_environment
from betoken.engine.ranks.memory import RankMemory
from betoken.engine.ranks.parent import end_with_parent
from betoken.engine.ranks.processes import RankProcesses
from betoken.verify_worker.doctor.gather import GATHER_BYTES, STATE_TOKENS

_NUM_WARM, _NUM_TIMED = 3, 15


def device_of_rank(device: str, rank: int) -> torch.device:
    """Return a rank's device: the named GPU is rank 0's, the following ones are the other ranks'."""
    named = torch.device(device)
    return named if named.type != "cuda" else torch.device("cuda", (named.index or 0) + rank)


def gather_seconds(group: RankGroup, device: torch.device) -> float:
    """Return the median time of a gather, whose result has `GATHER_BYTES`.

    Raises:
        RankLostError: an exchange failed, or another rank's bytes did not arrive.
    """
    own = torch.full((GATHER_BYTES // group.size,), group.rank, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_NUM_WARM + _NUM_TIMED):
        begin = time.perf_counter()
        gathered = group.stack(own)
        _wait_for(device)
        times.append(time.perf_counter() - begin)
    expected = torch.arange(group.size, device=device)[:, None]
    if not bool((gathered == expected).all()):
        raise RankLostError("a gather returned other bytes than the ranks sent")
    return median(times[_NUM_WARM:])


def pass_seconds(group: RankGroup, device: torch.device, num_tokens: int, width: int) -> float:
    """Return the median time from rank 0's message to the hidden states that have passed all stages.

    Raises:
        RankLostError: an exchange failed, or other bytes arrived.
    """
    shape, times = (1, num_tokens, width), []
    own = torch.arange(num_tokens * width).remainder(255).to(device, torch.bfloat16).view(shape)
    for _ in range(_NUM_WARM + _NUM_TIMED):
        begin = time.perf_counter()
        if group.rank == 0:
            group.send(np.zeros(1, np.int32))
        else:
            group.receive()
        states = own if group.stage == 0 else group.receive_states(shape, own.device)
        if group.stage < group.num_stages - 1:
            group.send_states(states)
        _wait_for(device)
        times.append(time.perf_counter() - begin)
        if not torch.equal(states, own):
            raise RankLostError("other hidden states arrived than the first stage sent")
    return median(times[_NUM_WARM:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure(group: RankGroup, device: torch.device, width: int) -> dict[str, float | str]:
    if group.num_stages == 1:
        return {"seconds": gather_seconds(group, device)}
    token_seconds, seconds = (pass_seconds(group, device, num_tokens, width) for num_tokens in STATE_TOKENS)
    return {"token_seconds": token_seconds, "seconds": seconds}


def _lead(device: str, size: int, num_stages: int, width: int) -> dict[str, float | str]:
    command = [sys.executable, "-m", __spec__.name, "follow", device, str(os.getpid()), str(num_stages), str(width)]
    processes = RankProcesses(size, command, b"", lambda error: None)
    try:
        own = device_of_rank(device, 0)
        group = join(0, size, processes.store, own, processes.memory, processes.explain, processes.lost, num_stages)
        found = _measure(group, own, width)
        group.send(np.zeros(0, np.int32))  # the end
        return found
    except Exception as error:  # backends raise many types
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        processes.close()


def _follow(device: str, parent: int, num_stages: int, width: int) -> None:
    end_with_parent()
    if os.getppid() != parent:
        return
    rank, size = place_in_environment()
    own = device_of_rank(device, rank)
    group = join(rank, size, store_in_environment(), own, RankMemory.in_environment(size), num_stages=num_stages)
    _measure(group, own, width)
    group.receive()


def main() -> None:
    """Be one rank."""
    role, device, *numbers = sys.argv[1:]
    try:
        if role == "follow":
            _follow(device, *map(int, numbers))
        else:
            sys.stdout.write(json.dumps(_lead(device, *map(int, numbers))))
    except Exception as error:  # the last words are the cause that rank 0 reports
        sys.stdout.write(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # a backend whose peers are gone may block the rest of the exit


if __name__ == "__main__":
    main()
