"""Fetching a model: one process at a time, each source in turn, and the final name last.

Two processes may fetch the same model at once: a lock file lets one work while the other waits. Temporary
files of unique names would need no lock, but nobody could go on from what an interrupted download left.
The system drops the lock with the process, so a crash leaves none behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from racer_local.errors import DownloadError
from racer_local.models.entry import Entry, Progress, SourceError
from racer_local.models.registry import entry_of

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl


class _Silent:
    def note(self, text: str) -> None:
        pass

    def advance(self, done: int, total: int | None) -> None:
        pass


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Gets a model of the registry unless it is there, and returns its path.

    Raises ModelError for an unknown name and DownloadError if no source delivers or the disk can't take it.
    """
    entry = entry_of(name)
    if entry.fetched:
        return entry.path
    progress = progress or _Silent()
    try:
        entry.path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry, progress):
            if not entry.fetched:
                _publish(_try_sources(entry, progress), entry)
    except OSError as error:
        raise DownloadError(
            f"can't store {entry.name} in {entry.path.parent}: {error.strerror or error}; "
            "make room there, or set RACER_LOCAL_HOME to another folder"
        ) from error
    return entry.path


def _try_sources(entry: Entry, progress: Progress) -> Path:
    """What the first source that delivers has left under a temporary name."""
    failures = []
    for source in entry.sources:
        try:
            return source.download(entry, progress)
        except SourceError as error:
            failures.append(f"{source.host}: {error}")
            progress.note(failures[-1])
    raise DownloadError(
        f"can't fetch {entry.name} ({'; '.join(failures)}); check the network or HTTPS_PROXY, "
        f"or put the file at {entry.path}"
    )


def _publish(checked: Path, entry: Entry) -> None:
    with checked.open("rb+") as file:
        # The name promises whole contents, after a power cut too.
        os.fsync(file.fileno())
    checked.replace(entry.path)
    for path in entry.path.parent.iterdir():
        if path.name.startswith(f"{entry.file}.part"):
            path.unlink()


@contextmanager
def _lock(entry: Entry, progress: Progress) -> Iterator[None]:
    """Lets one process at a time past, for each model. The empty lock file stays: deleting it is a race."""
    with entry.path.with_name(f"{entry.file}.lock").open("ab") as file:
        if not _try_lock(file):
            progress.note(f"another process is fetching {entry.name}; waiting for it")
            while not _try_lock(file):
                time.sleep(0.1)
        yield


def _try_lock(file: BinaryIO) -> bool:
    try:
        if sys.platform == "win32":
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
