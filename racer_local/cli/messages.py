"""What a command says beside its result: on stderr, as text or JSON (--log-json), or nothing but errors (--quiet)."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any

ERROR = logging.ERROR
_log = logging.getLogger("racer_local")
_OURS = ("racer_local", "uvicorn")
"""Loggers whose lines are a command's own."""


class _Json(logging.Formatter):
    """An object a line: time (UTC), level, message, and what else the line is made of."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "message": record.getMessage()}
        return json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        if hasattr(record, "fields"):
            return record.getMessage()
        return f"racer-local: {'error: ' if record.levelno >= ERROR else ''}{record.getMessage()}"


def configure(*, quiet: bool = False, log_json: bool = False) -> None:
    """From now on; once for each run of a command."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_json else _Text())
    handler.setLevel(ERROR if quiet else logging.INFO)
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
    _log.setLevel(logging.INFO)


def tell(message: str) -> None:
    """Something worth knowing, in one line."""
    _log.info(message)


def report(text: str, **fields: Any) -> None:
    """Figures: the text as it is, or the fields beside it in JSON."""
    _log.info(text, extra={"fields": fields})


def error(message: str) -> None:
    """What went wrong, and what to change."""
    _log.error(message)


def progress(*args: Any, **options: Any) -> Any:
    """A tqdm bar, on a terminal that is not to be quiet."""
    from tqdm import tqdm

    return tqdm(*args, disable=None if drawing() else True, **options)


def drawing() -> bool:
    """Whether progress may be drawn on stderr, where that is a terminal."""
    return any(handler.level < ERROR and not isinstance(handler.formatter, _Json) for handler in _log.handlers)
