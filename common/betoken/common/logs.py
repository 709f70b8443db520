"""One form for all lines of a service's log: text or JSON, one record a line, control characters escaped.

Python's records and the text that native code (gRPC) writes to standard error share it. Native text passes through a
small process, this file as a script, so that the last lines of an aborted service are kept. Prompts and generated text
are never logged. Imports nothing beyond the standard library.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

LogFormat = Literal["text", "json"]

MAX_CHARS = 8192
"""Longest text of a message or a field, characters: peers choose some of them."""
_PLAIN_VALUE = re.compile(r"[\w.:/@+-]+", re.ASCII)
_ABSEIL = re.compile(rb"([IWEF])\d{4} [\d:.]+ +\d+ ([\w.]+:\d+)\] ")
_ABSEIL_LEVELS = {b"I": logging.INFO, b"W": logging.WARNING, b"E": logging.ERROR, b"F": logging.CRITICAL}
_PACKET_BYTES = 4096  # of a pipe in packet mode; a longer write comes in several
_MAX_WRITE_BYTES = 1 << 16


def escaped(text: str) -> str:
    """`text` on one line: what does not print (line breaks, escape sequences, marks of direction) as in Python."""
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def fields(**values: Any) -> dict[str, Any]:
    """Named values of a record, for the `extra` of a logging call: `key=value` in text, members of the JSON object."""
    return {"fields": values}


class _Text(logging.Formatter):
    """Time in UTC, level, logger, text, fields; the lines of a traceback follow, indented, so that none looks whole."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging names it)
        values: Mapping[str, Any] = getattr(record, "fields", {})
        record.message = " ".join((escaped(record.message), *(f"{key}={_value(values[key])}" for key in values)))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(f"    {escaped(line)}" for line in super().formatException(ei).splitlines())


class _Json(logging.Formatter):
    """An object a line: time, level, logger, message, the record's fields, exception."""

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        shown = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        shown |= {key: _cut(value) for key, value in getattr(record, "fields", {}).items()}
        if record.exc_info:
            shown["exception"] = self.formatException(record.exc_info)
        return json.dumps(shown, default=str)  # ASCII: all else is escaped


def configure_logging(level: str, form: LogFormat = "text", *, captures_stderr: bool = False) -> None:
    """Log records of at least `level` (`debug` ... `error`) to stderr, replacing earlier handlers.

    `captures_stderr`: other writes to standard error take the same form from now on. Once per process.
    """
    stream = _captured(level, form) if captures_stderr else sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if captures_stderr:
        sys.excepthook = lambda *error: logging.critical("unhandled exception", exc_info=error[1])
        threading.excepthook = lambda error: logging.critical("unhandled exception in a thread", exc_info=error[1])
        logging.captureWarnings(True)


def _formatter(form: LogFormat) -> logging.Formatter:
    return _Json() if form == "json" else _Text()


def _value(value: Any) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else escaped(json.dumps(text, ensure_ascii=False))


def _cut(value: Any) -> Any:
    is_long = isinstance(value, str) and len(value) > MAX_CHARS
    return f"{value[:MAX_CHARS]}... ({len(value)} characters)" if is_long else value


def _captured(level: str, form: LogFormat) -> TextIO:
    """Puts a pipe in standard error's place; returns the stream for writers that format their own lines.

    Its packet mode keeps apart what was written apart, so that a peer's line break begins no line. On systems without
    that mode (macOS) native lines stay as they are.
    """
    packet_mode = getattr(os, "O_DIRECT", None)
    if packet_mode is None or not hasattr(os, "pipe2"):
        return sys.stderr
    kept = os.dup(2)
    reading, writing = os.pipe2(os.O_CLOEXEC | packet_mode)
    command = [sys.executable, "-I", "-S", __file__, level, form]
    # A separate session: signals to the service's process group do not reach it; it ends with the last writer.
    _processes.append(subprocess.Popen(command, stdin=reading, stdout=kept, stderr=kept, start_new_session=True))
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)
    return os.fdopen(kept, "w", encoding="utf-8", errors="backslashreplace", buffering=1)


_processes: list[subprocess.Popen[bytes]] = []
"""Referenced, because Python warns if a running process is garbage collected."""


def _log_native(written: bytes) -> None:
    """One write to standard error: a line of gRPC's, whatever it quotes, or lines of somebody else."""
    if (found := _ABSEIL.match(written)) is not None:
        text = written[found.end() :].decode("utf-8", "backslashreplace").removesuffix("\n")
        logging.getLogger("grpc").log(_ABSEIL_LEVELS[found[1]], "%s: %s", found[2].decode(), text)
        return
    for line in written.decode("utf-8", "backslashreplace").splitlines():
        if line.strip():
            logging.getLogger("stderr").warning("%s", line)


def main() -> None:
    """Reads standard input to its end, and writes to standard output what it says in the form of the log."""
    level, form = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_formatter("json" if form == "json" else "text"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    written = b""
    while packet := os.read(0, _MAX_WRITE_BYTES):
        written += packet
        is_part = len(packet) == _PACKET_BYTES and not packet.endswith(b"\n")
        if not is_part or len(written) > _MAX_WRITE_BYTES:
            _log_native(written)
            written = b""
    if written:
        _log_native(written)


if __name__ == "__main__":
    main()
