"""The command as a process."""

import subprocess
import sys


def start(arguments: list[str], **options) -> subprocess.Popen[str]:
    """The command as a process, with `fake_service` for the real services."""
    # A background shell has SIGINT ignored, nohup SIGHUP.
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    code += "from betoken.cli import local_services as l, main\n"
    code += "l.VERIFY_MODULE = l.DRAFT_MODULE = l.ROUTER_MODULE = l.GATEWAY_MODULE = 'fake_service'\nmain.app()"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, **options)
