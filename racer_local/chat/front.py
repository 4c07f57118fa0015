"""What a place to chat in must do, and how Ctrl-C stops an answer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from racer_local.pieces import Piece

Write = Callable[[Piece], object]


class Front(Protocol):
    """Where the user types and reads."""

    interactive: bool
    """Whether somebody sits there who can be asked."""

    def read(self, prefill: str, status: Sequence[str]) -> str:
        """What the user types; the input line begins with `prefill`, the `status` stands below it.

        Raises EOFError at the end, KeyboardInterrupt for Ctrl-C.
        """

    def say(self, text: str) -> None:
        """A result that was asked for."""

    def note(self, text: str) -> None:
        """Something worth knowing, in one line."""

    def error(self, text: str) -> None:
        """What went wrong, in one line."""

    def choose(self, question: str, choices: Mapping[str, str], default: str) -> str:
        """One of the letters in `choices`; `default` where nobody can be asked, or nothing was chosen."""

    def answer(self, tint: bool) -> AbstractContextManager[Write]:
        """Shows an answer as its pieces come; with `tint`, which source drafted each token."""

    def recall(self, question: str, answer: str) -> None:
        """Shows an exchange of a chat that goes on."""

    def legend(self) -> None:
        """Says in one line what the colours of a tinted answer mean."""

    def clear(self) -> None:
        """Empties the screen, if there is one."""


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Ctrl-C, however often, only asks the work to stop at its next step."""
    pressed = False

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
