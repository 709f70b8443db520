"""Memory use of loading a checkpoint, measured in this process; started by `test_memory`.

    python tests/engine/memory_child.py WARM_UP_CHECKPOINT CHECKPOINT

A tiny checkpoint of the same kind is loaded first, so that code is in memory before anything is measured. Prints one
JSON object: bytes that stay, and the most there were, above what the process held before.
"""

import gc
import json
import re
import sys
from pathlib import Path

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner


def load(path: str) -> ModelRunner:
    config = EngineConfig(path, num_pages=4, num_threads=2, max_context=64, compile="off", self_check=False)
    return load_runner(config)


def held(name: str) -> int:
    """A figure of /proc/self/status in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def main() -> None:
    load(sys.argv[1])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = held("VmRSS")
    runner = load(sys.argv[2])
    gc.collect()
    sys.stdout.write(json.dumps({"resident": held("VmRSS") - before, "peak": held("VmHWM") - before}) + "\n")
    del runner


if __name__ == "__main__":
    main()
