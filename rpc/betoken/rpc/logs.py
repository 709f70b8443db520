"""Plain logging: one line per record on stderr. Knows no service; nobody logs prompts or generated text."""

import logging
import sys
import time


class _OneLine(logging.Formatter):
    """Time in UTC, level, logger, text; line breaks of foreign text are escaped, tracebacks stay readable."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging names it)
        record.message = record.message.replace("\r", "\\r").replace("\n", "\\n")
        return super().formatMessage(record)


def configure_logging(level: str) -> None:
    """Log records of at least `level` (`debug` ... `error`) to stderr, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
