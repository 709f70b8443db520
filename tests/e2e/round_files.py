"""Prints the files whose code runs in rounds with a remote drafter, without failures; started by `test_round_files`."""

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
SKIPPED = ("_pb2", "/client/", "/tests/", "/lab/", "/testing/")
"""Generated code, the SDK, which this process hosts as well, and code that only tests use."""

files: set[str] = set()
is_counting = False


def note(frame: FrameType, event: str, _argument: Any) -> None:
    """Profile function: record the file of a call."""
    if is_counting and event == "call":
        files.add(frame.f_code.co_filename)


async def main(folder: Path) -> None:
    """Stream one answer over real links; count from its second piece to the last but one."""
    global is_counting
    from betoken.client import Sampling, Speculation
    from tests.e2e.in_process import save_pair, services

    save_pair(folder)
    sampling = Sampling(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    how = Speculation(drafter="ngram", num_draft_tokens=4)
    async with services(folder, {"drafters": ("ngram",)}) as client:
        await client.complete([5, 6, 7, 5, 6], sampling=sampling, speculation=how)
        num_pieces = 0
        async for _ in client.generate([5, 6, 7, 5, 6], sampling=sampling, speculation=how):
            num_pieces += 1
            is_counting = 2 <= num_pieces < 12
    assert num_pieces > 12


if __name__ == "__main__":
    threading.setprofile(note)
    sys.setprofile(note)
    asyncio.run(main(Path(sys.argv[1])))
    sys.setprofile(None)
    names = {str(Path(name).relative_to(ROOT)) for name in files if name.startswith(str(ROOT))}
    sys.stdout.write(
        " ".join(
            sorted(name for name in names if "/betoken/" in name and not any(part in f"/{name}" for part in SKIPPED))
        )
    )
