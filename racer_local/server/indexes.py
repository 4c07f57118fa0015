"""The indexes that a server's answers may draft from: those named at its start, and those that clients had made."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from racer_local.config import cache_home
from racer_local.corpus.build import collect
from racer_local.corpus.files import walk
from racer_local.corpus.index import create
from racer_local.corpus.store import Store
from racer_local.errors import CorpusError, RacerError
from racer_local.llama.vocabulary import Vocabulary
from racer_local.wire.errors import ApiError

MOST_FILE_BYTES = 1 << 26
"""Of one file that is taken in."""


class Indexes:
    """Indexes by id. No path comes from a client but one within a folder that was named at the start."""

    def __init__(self, named: Sequence[str], folders: Sequence[str], made: Path | None = None) -> None:
        self._named = _by_stem(named)
        self._folders = [os.path.realpath(Path(folder).expanduser()) for folder in folders]
        self._made = made or cache_home() / "indexes"

    def paths(self, ids: Sequence[str]) -> list[str]:
        """The files of these indexes. Raises ApiError where there is no such index."""
        known = self._known()
        for name in ids:
            if name not in known:
                listed = ", ".join(known) or "there are none"
                raise ApiError(
                    404, f"there is no corpus {name!r}; known: {listed}", code="corpus_not_found", param="racer"
                )
        return [str(known[name]) for name in ids]

    def listed(self) -> list[dict[str, Any]]:
        """What GET /v1/corpora shows."""
        shown = []
        for name, path in self._known().items():
            try:
                store = Store(path)
            except (RacerError, OSError):
                continue
            size = {"tokens": store.n_tokens, "bytes": store.size, "files": len(store.all_files)}
            shown.append({"id": name, "object": "corpus", **size, "removable": name not in self._named})
            store.close()
        return shown

    def allowed(self, path: str) -> Path:
        """A client's path, absolute or from a named folder on, if it lies within one. Raises ApiError, outside of them
        alike whether it is there or not."""
        if "\0" in path:
            raise ApiError(404, "there is no such file or folder", param="path")
        path = os.path.expanduser(path)
        inside = [os.path.join(folder, path) for folder in self._folders]  # an absolute path stays what it is
        real = os.path.realpath(next(filter(os.path.exists, inside), path))
        if not any(real == folder or real.startswith(folder.rstrip(os.sep) + os.sep) for folder in self._folders):
            where = "none was named (--folder)" if not self._folders else "name one within a --folder of this server"
            raise ApiError(403, f"the path is not within a folder that may be read; {where}", param="path")
        if not os.path.exists(real):
            raise ApiError(404, "there is no such file or folder", param="path")
        return Path(real)

    def make(
        self, name: str, path: Path, vocabulary: Vocabulary, *, chat: bool, go_on: Callable[[], object]
    ) -> dict[str, Any]:
        """Index a file or folder, in the place of an index of this id. Raises ApiError, CorpusError, and what `go_on`
        does, which is called again and again."""
        if name in self._named:
            raise ApiError(403, f"the corpus {name!r} was named at the server's start; take another id", param="id")
        self._made.mkdir(parents=True, exist_ok=True, mode=0o700)
        skipped: Counter[str] = Counter()
        files = list(walk([path], max_bytes=MOST_FILE_BYTES, skipped=skipped))

        def report(_characters: int) -> None:
            go_on()

        part = collect(files, vocabulary, self._made, chat=chat, max_tokens=None, skipped=skipped, report=report)
        if not part.files:
            raise CorpusError("no text was found there; name a file or folder with text in it")
        create(self._made / f"{name}.index", vocabulary.id, part)
        return next(each for each in self.listed() if each["id"] == name)

    def drop(self, name: str) -> None:
        """Delete an index that a client had made. Raises ApiError."""
        if name in self._named:
            raise ApiError(403, f"the corpus {name!r} was named at the server's start; it can't be dropped")
        (path,) = self.paths([name])
        Path(path).unlink()

    def _known(self) -> dict[str, Path]:
        made = sorted(self._made.glob("*.index")) if self._folders and self._made.is_dir() else []
        return {**{path.stem: path for path in made if not path.is_symlink()}, **self._named}


def _by_stem(paths: Sequence[str]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for text in paths:
        path = Path(text).expanduser().absolute()
        name = path.stem if path.stem not in named else path.name
        if name in named:
            raise CorpusError(f"two --corpus files are named {path.name}; rename one of them")
        named[name] = path
    return named
