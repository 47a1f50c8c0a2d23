"""Where the service's log records go: JSON lines, or short text on a terminal.

Promises one line a record, with whatever ids its `extra` carried. It must not see secrets: callers log names,
never values. Neighbour: every `logging.getLogger("microvm…")` of the service.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final, TextIO

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(level: str, stream: TextIO | None = None) -> None:
    """Sends all records of level `level` and above to `stream` (stderr), once for the process."""
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(_TextLines() if target.isatty() else _JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("hypercorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "component": record.name,
            "msg": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class _TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={value}" for name, value in _extras(record).items())
        text = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()}: "
        text += " ".join(part for part in (record.getMessage(), facts) if part)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
