"""One caller at a time. A stream keeps its turn from its first token to its last, on whichever thread it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing
from time import monotonic
from types import TracebackType
from typing import TypeVar

from racer_local.errors import ModelError

T = TypeVar("T")

GRACE = 30.0
"""Seconds for which a thread waits for a stream that it read from last itself, and that nobody reads on."""


class Turn:
    """A lock. Whoever has it may take it again. A stream keeps it while it is not read, and may be read elsewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        """The thread that works, or read a stream last."""
        self._depth = 0
        """How often it has been taken."""
        self._unread = False
        """Whether a stream has it that nobody reads now."""
        self._since = 0.0
        self.over = False
        """Whether there are no more turns."""

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner == me and not self._unread:
            self._depth += 1
            return
        self.check()
        while not self._lock.acquire(timeout=0.05):
            self._check_that_somebody_goes_on(me)
            self.check()
        self._owner, self._depth = me, 1

    def check(self) -> None:
        """Raises ModelError when there are no more turns."""
        if self.over:
            raise ModelError("this Llama is closed; open it again")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()

    def stream(self, make: Callable[[], Generator[T, None, None]]) -> Generator[T, None, None]:
        """The items of a generator that runs in a turn of its own, which ends with it or when it is closed."""
        with self, closing(make()) as items:
            for item in items:
                self._unread, self._since = True, monotonic()
                try:
                    yield item
                finally:
                    self._owner, self._unread = threading.get_ident(), False

    def waits_to_be_read(self) -> bool:
        """Whether a stream has it that nobody reads now."""
        return self._unread

    def _check_that_somebody_goes_on(self, me: int) -> None:
        """A single thread that waits for its own stream would wait for ever."""
        if self._owner == me and self._unread:
            alone = threading.active_count() == 1
            if alone or monotonic() - self._since > GRACE:
                raise RuntimeError("a stream of this thread is still open; read it to its end or close() it first")
