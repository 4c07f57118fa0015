"""The models that have a name: reading their list, and finding a model's file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from racer_local.errors import ModelError
from racer_local.models.entry import Entry, Source
from racer_local.models.sources import HubSource, PypiSource, WheelPart


def registry_path() -> Path:
    """The installed copy, else the checkout's file."""
    package = Path(__file__).parents[1]
    installed = package / "registry.json"
    return installed if installed.is_file() else package.parent / "models" / "registry.json"


def load_registry() -> dict[str, Entry]:
    """All known models by name, in the file's order. Raises ModelError if the file is missing or wrong."""
    path = registry_path()
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"can't read the model registry {path}: {error}; reinstall racer-local") from error
    entries = [_parse_entry(item) for item in _field(raw, "models", list)]
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ModelError(f"a name stands twice in the model registry {path}; rename one of the two")
    return by_name


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
    if text in entries:
        return _find_fetched(entries[text])
    # os.path, for it takes any text: pathlib raises for a name that is too long or a home that is not known.
    path = Path(os.path.expanduser(text))
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        raise ModelError(f"{path} is a folder; name the .gguf file in it")
    if path.name != text or path.suffix.lower() == ".gguf":
        raise ModelError(f"no such file: {path}; give the path of a GGUF file or one of {', '.join(entries)}")
    raise ModelError(f"{text!r} is neither a file nor a known model; known names: {', '.join(entries)}")


def _find_fetched(entry: Entry) -> Path:
    if entry.fetched:
        return entry.path
    state = f"damaged ({entry.path} has the wrong size)" if entry.path.exists() else "not fetched yet"
    raise ModelError(f"{entry.name} is {state}; run: racer-local models fetch {entry.name}")


def _parse_entry(raw: Any) -> Entry:
    return Entry(
        **_texts(raw, "name", "description", "licence", "licence_url", "file", "sha256"),
        size=_field(raw, "size", (int, type(None))),
        sources=tuple(map(_parse_source, _field(raw, "sources", list))),
    )


def _parse_source(raw: Any) -> Source:
    kind = _field(raw, "kind", str)
    if kind == "hub":
        return HubSource(**_texts(raw, "repo", "file", "revision"))
    if kind == "pypi":
        parts = (_texts(part, "package", "version", "member") for part in _field(raw, "parts", list))
        return PypiSource(tuple(WheelPart(**part) for part in parts))
    raise ModelError(f"the model registry names a source of kind {kind!r}; known are hub and pypi")


def _texts(raw: Any, *keys: str) -> dict[str, Any]:
    return {key: _field(raw, key, str) for key in keys}


def _field(raw: Any, key: str, kind: type | tuple[type, ...]) -> Any:
    value = raw.get(key) if isinstance(raw, Mapping) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"{key!r} is missing or of the wrong type in the model registry, at {str(raw)[:80]}")
    return value
