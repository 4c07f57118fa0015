"""What a command does to its own process: Ctrl-C, SIGTERM, and output that can show any character."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the work to stop at its next step, a second one stops it where it is."""
    pressed = False

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is a Ctrl-C: what was opened is closed, and the programs that were started end too."""

    def on_terminate(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_any_character() -> None:
    """A terminal that can't show a character shows a replacement, and does not end the answer."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
