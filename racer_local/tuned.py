"""The settings that were found best for a model file on this machine, kept until they are forgotten.

They stand for what a user leaves open, in every command. What was found for another state of the file, another CPU or
another build says nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from racer_local import binding, remembered
from racer_local.config import ContextConfig

KIND, FORMAT = "tuned", 1
SETTINGS = ("threads", "flash_attn", "kv_type")
"""Fields of ContextConfig that can be remembered."""


class Tuned(NamedTuple):
    """What is remembered of one file."""

    model: str
    """Its path."""
    settings: dict[str, Any]
    in_force: bool
    """Whether it is of this file as it is now, on this CPU with this build."""


def recall(path: Path) -> dict[str, Any]:
    """Settings by their names in ContextConfig; none where nothing is remembered."""
    found = _sound(remembered.recall(KIND, FORMAT, _facts(path)))
    return {} if found is None else found


def remember(path: Path, settings: Mapping[str, Any]) -> None:
    """In place of what was remembered before. Raises ConfigError for settings that can't be."""
    ContextConfig(**settings)
    remembered.remember(KIND, FORMAT, _facts(path), {"settings": dict(settings)})


def forget(path: Path) -> bool:
    """Whether there was anything. All that was ever remembered of the file goes."""
    return remembered.forget(KIND, FORMAT, lambda facts: facts.get("model") == str(path.resolve()))


def everything() -> Iterator[Tuned]:
    """All that is remembered, by path."""
    for facts, data in remembered.everything(KIND, FORMAT):
        settings = _sound(data)
        if settings is not None and "model" in facts:
            path = Path(str(facts["model"]))
            yield Tuned(str(path), settings, path.is_file() and _facts(path) == facts)


def _sound(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The settings in it, if they are any that a context can have."""
    try:
        settings = {name: value for name, value in (data or {})["settings"].items() if name in SETTINGS}
        ContextConfig(**settings)
        return settings
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


def _facts(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {
        "model": str(path.resolve()),
        "bytes": stat.st_size,
        "modified": stat.st_mtime_ns,
        "cpu": binding.cpu_model(),
        "build": metadata.version(binding.NAME),
    }
