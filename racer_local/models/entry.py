"""What a model is, and who takes part in fetching one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from racer_local.config import cache_home
from racer_local.errors import DownloadError, ModelError


class Progress(Protocol):
    """Who wants to watch a fetch."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def advance(self, done: int, total: int | None) -> None:
        """`done` of `total` bytes have arrived; None is a total that nobody knows."""


class SourceError(DownloadError):
    """Why one source can't deliver; the next one is tried."""


class Source(Protocol):
    """A place that a model can be had from."""

    @property
    def host(self) -> str:
        """For messages."""

    def download(self, entry: Entry, progress: Progress) -> Path:
        """The checked file, under a temporary name.

        Raises SourceError if another source may do better, DownloadError if none can.
        """


@dataclass(frozen=True)
class Entry:
    """One model of the registry."""

    name: str
    description: str
    licence: str
    licence_url: str
    file: str
    """File name in `models_home()`."""
    size: int | None
    """Bytes; None is not known."""
    sha256: str
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        self._require(re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.name), "name must be one lower-case word")
        # The name is joined to a folder: it must not lead out of it.
        self._require(re.fullmatch(r"\w[\w.+-]*", self.file), "file must be a plain file name")
        self._require(re.fullmatch(r"[0-9a-f]{64}", self.sha256), "sha256 must be 64 lower-case hex digits")
        self._require(self.size is None or self.size > 0, "size must be a number of bytes or null")
        self._require(self.sources, "sources must name at least one source")

    def _require(self, fine: object, rule: str) -> None:
        if not fine:
            raise ModelError(f"entry {self.name!r} of the model registry: {rule}")

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


def readable_size(size: int | None) -> str:
    """Bytes for people, in decimal units as the Hub and disk makers count."""
    if size is None:
        return "?"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}" if size < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size} B"
