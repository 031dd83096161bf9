"""Log lines to standard error, as text for people or as JSON for collectors.

Requests are not logged one by one, and prompts and completions never: what is logged are changes of state. Lines of a
gateway's worker carry its number.
"""

import logging
import sys
import time
from typing import Literal

import msgspec


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._whose = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._whose,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure_logging(level: str, format_: Literal["text", "json"], worker: int | None = None) -> None:
    """Set up the root logger of this process, which may be the worker of this number."""
    handler = logging.StreamHandler(sys.stderr)
    whose = "" if worker is None else f"[worker {worker}] "
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {whose}%(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter(worker) if format_ == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
