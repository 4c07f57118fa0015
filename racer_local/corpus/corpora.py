"""The indexes that a drafter reads: opened once, and again when somebody has written them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from racer_local.corpus.store import Store, identity
from racer_local.errors import ConfigError, CorpusError
from racer_local.kernels.suffixes import as_index
from racer_local.text import VocabularyId

Notify = Callable[[str], object]


class Corpora:
    """Some indexes of one vocabulary; None: whatever theirs is. `own` need not be there yet.

    Raises CorpusError where one can't be used.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        vocabulary: VocabularyId | None,
        notify: Notify = lambda message: None,
        own: str | Path | None = None,
    ) -> None:
        if not hasattr(os, "pread"):
            raise ConfigError("indexes can be used on Linux and macOS only; leave out corpora (--corpus)")
        self._vocabulary, self._notify = vocabulary, notify
        named = [Path(path).expanduser() for path in paths]
        self._stores: dict[Path, Store | None] = {path: Store(path, vocabulary) for path in named}
        if own is not None and (path := Path(own).expanduser()) not in self._stores:
            self._stores[path] = Store(path, vocabulary) if path.exists() else None
        self._failed: dict[Path, object] = {}
        self._take_in()

    def _take_in(self) -> None:
        stores = [store for store in self._stores.values() if store]
        self.index = as_index(
            [place for store in stores for place in store.places],
            [directory for store in stores for directory in store.resident("directory")],
            [starts for store in stores for starts in store.resident("starts")],
        )
        """For `kernels.suffixes.find`. It reads from files that this object keeps open."""

    def refresh(self) -> bool:
        """Open anew what was written since; says whether anything was.

        An index that is gone is not used any more. One that can't be read stays as it was, with a notice.
        """
        changed = False
        for path, store in self._stores.items():
            try:
                now = identity(os.stat(path))
            except OSError:
                now = None
            if now == (store.identity if store else None) or (now and now == self._failed.get(path)):
                continue
            try:
                self._stores[path] = Store(path, self._vocabulary) if now else None
                self._failed.pop(path, None)
                changed = True
            except CorpusError as error:
                self._failed[path] = now
                self._notify(f"{error}; what was open is used on")
        if changed:
            self._take_in()
        return changed
