"""What was measured on this machine, kept for the next start: one JSON file for each kind and set of facts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from racer_local.config import cache_home


def recall(kind: str, format: int, facts: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any] | None:
    """What was remembered of these facts (model, build, threads, ...), or None.

    A file that is damaged, of another format or about other facts is as good as none.
    """
    try:
        data = json.loads(_path(kind, facts, folder).read_text(encoding="utf-8"))
        same = data["format"] == format and data["facts"] == json.loads(json.dumps(facts))
        return data if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(
    kind: str, format: int, facts: Mapping[str, Any], data: Mapping[str, Any], folder: Path | None = None
) -> None:
    """Keep `data`, JSON, for these facts; where the folder can't be written it is measured again next time."""
    path = _path(kind, facts, folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            try:
                json.dump({"format": format, "facts": dict(facts), **data}, file)
                file.close()
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError:
        return


def _path(kind: str, facts: Mapping[str, Any], folder: Path | None) -> Path:
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return (folder or cache_home() / kind) / f"{key}.json"


def everything(kind: str, format: int, folder: Path | None = None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Facts and data of all that is remembered of a kind, by file name; what is damaged is left out."""
    for path in sorted((folder or cache_home() / kind).glob("*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] == format and isinstance(data["facts"], dict):
                yield data["facts"], data
        except (OSError, ValueError, KeyError, TypeError):
            continue


def forget(kind: str, format: int, meant: Callable[[dict[str, Any]], bool], folder: Path | None = None) -> bool:
    """Drop what is remembered of the facts that are meant; whether there was any."""
    gone = [facts for facts, _ in everything(kind, format, folder) if meant(facts)]
    for facts in gone:
        _path(kind, facts, folder).unlink(missing_ok=True)
    return bool(gone)
