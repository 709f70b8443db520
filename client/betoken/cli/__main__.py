"""`betoken`, or `python -m betoken.cli`: what has to be settled before anything is imported."""

import io
import os
import sys

from betoken.common.release import how_to_install


def main() -> int:
    """Run the command; return the process's exit status unless it exits by itself."""
    if sys.argv[1:2] in (["generate"], ["chat"], ["info"]):
        # Every failed call is reported as a typed error; gRPC's own log lines are less informative. Read at its import.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # answers hold characters that not every locale can write
    try:
        from betoken.cli.main import app

        app()
    except KeyboardInterrupt:  # imports take a moment
        return 130
    except ModuleNotFoundError as error:
        if error.name != "typer":  # which brings rich
            raise
        sys.stderr.write(f"betoken: the command needs typer: {how_to_install('cli')}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
