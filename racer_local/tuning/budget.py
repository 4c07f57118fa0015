"""The seconds that measuring may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Budget:
    """Runs down from when it is made."""

    def __init__(self, seconds: float, clock: Callable[[], float] = perf_counter) -> None:
        self.seconds, self.clock = seconds, clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds; below 0 where more was used."""
        return self._end - self.clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What the body takes does not count."""
        started = self.clock()
        try:
            yield
        finally:
            self._end += self.clock() - started

    def part(self, share: float) -> Budget:
        """A share of what is left, as a budget of its own."""
        return Budget(share * max(0.0, self.left), self.clock)
