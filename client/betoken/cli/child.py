"""Runs a service's module in this process, and ends it when the process that started it is gone, however that ended.

`python -m betoken.cli.child MODULE ARGUMENTS...`; standard input is a pipe whose other end the parent holds.
"""

import os
import runpy
import signal
import sys
import threading
import time

_GRACE_S = 15.0


def _follow_parent() -> None:
    """Waits for the end of standard input, which comes with the parent's end; then asks, then insists."""
    while os.read(0, 4096):
        pass
    sys.stderr.write("the process that started this service is gone; stopping\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Becomes the module named by the first argument."""
    sys.argv = sys.argv[1:]
    threading.Thread(target=_follow_parent, daemon=True, name="follow-parent").start()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
