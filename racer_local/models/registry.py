"""The models that have a name: what the registry says of them, and finding a model's file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racer_local.config import cache_home
from racer_local.errors import ModelError


@dataclass(frozen=True)
class Entry:
    """One model of the registry, with its fields as they stand there."""

    name: str
    description: str
    licence: str
    licence_url: str
    file: str
    """File name in `models_home()`."""
    size: int | None
    """Bytes; None is not known."""
    sha256: str
    sources: list[Mapping[str, Any]]

    @property
    def path(self) -> Path:
        return models_home() / self.file

    @property
    def fetched(self) -> bool:
        """Whether the file is there and whole. Its hash was checked when it got its name."""
        return self.path.is_file() and self.size in (None, self.path.stat().st_size)


def models_home() -> Path:
    """The folder of the fetched models."""
    return cache_home() / "models"


def registry_path() -> Path:
    """The installed copy, else the checkout's file."""
    package = Path(__file__).parents[1]
    installed = package / "registry.json"
    return installed if installed.is_file() else package.parent / "models" / "registry.json"


def load_registry() -> dict[str, Entry]:
    """All known models by name, in the file's order. Raises ModelError if the file is missing or damaged."""
    path = registry_path()
    try:
        entries = [Entry(**item) for item in json.loads(path.read_text("utf-8"))["models"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"can't read the model registry {path}: {error}; reinstall racer-local") from error
    return {entry.name: entry for entry in entries}


def entry_of(name: str) -> Entry:
    """The registry's entry. Raises ModelError if there is none."""
    entries = load_registry()
    if name not in entries:
        raise ModelError(f"no model is called {name!r}; known names: {', '.join(entries)}")
    return entries[name]


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The file that is meant: a known name gives the fetched file, all else is a path.

    Raises ModelError if it is not there.
    """
    text = os.fspath(name_or_path)
    entries = load_registry()
    if entry := entries.get(text):
        if entry.fetched:
            return entry.path
        state = f"damaged ({entry.path} has the wrong size)" if entry.path.exists() else "not fetched yet"
        raise ModelError(f"{entry.name} is {state}; run: racer-local models fetch {entry.name}")
    # os.path, for it takes any text: pathlib raises for a name that is too long or a home that is not known.
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        raise ModelError(f"{path} is a folder; name the .gguf file in it")
    if path.name != text or path.suffix.lower() == ".gguf":
        raise ModelError(f"no such file: {path}; give the path of a GGUF file or one of {', '.join(entries)}")
    raise ModelError(f"{text!r} is neither a file nor a known model; known names: {', '.join(entries)}")


def readable_size(size: int | None) -> str:
    """Bytes for people, in decimal units as the Hub and disk makers count."""
    if size is None:
        return "?"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size} B"
