"""From token bytes to text that can be shown while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class VocabularyId(NamedTuple):
    """Which vocabulary token ids are of."""

    fingerprint: str
    """Equal where the same id is the same text."""
    n_vocab: int
    model: str
    """The path of a model file that has it."""


class StopMatcher:
    """Finds the first of several stop strings in bytes that come piece by piece.

    What may be the beginning of a stop string is held back until it is known. The one that begins first wins among
    those that are complete.

    >>> stops = StopMatcher([b"END", b"\\n\\n"])
    >>> stops.push(b"the E"), stops.push(b"N"), stops.push(b"D of"), stops.found
    (4, 4, 4, True)
    """

    def __init__(self, stops: Sequence[bytes]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = b""
        self._passed = 0
        """Bytes before those held back."""
        self.found = False
        """Whether a stop string is there; then nothing behind what passed will."""

    def push(self, data: bytes) -> int:
        """How many bytes, of all pushed so far, are known not to belong to a stop string."""
        if self.found:
            return self._passed
        self._held += data
        starts = [at for at in map(self._held.find, self._stops) if at >= 0]
        self.found = bool(starts)
        safe = min(starts) if starts else len(self._held) - self._begun()
        self._held = self._held[safe:]
        self._passed += safe
        return self._passed

    def flush(self) -> int:
        """How many bytes pass if no more come: without a complete stop string all of them."""
        return self._passed + (0 if self.found else len(self._held))

    def _begun(self) -> int:
        """The length of the longest end of what is held that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        ends = (self._held[-n:] for n in range(min(longest, len(self._held)), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
