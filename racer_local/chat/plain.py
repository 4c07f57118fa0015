"""A chat through a pipe: a message or command a line on stdin, answers on stdout, all else on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import BinaryIO, TextIO

from racer_local.chat.front import Write
from racer_local.chat.texts import is_open, printable
from racer_local.pieces import Piece


class Plain:
    """No colours and no escape codes."""

    interactive = False

    def __init__(
        self,
        stdin: BinaryIO,
        stdout: TextIO,
        *,
        say: Callable[[str], object],
        note: Callable[[str], object],
        error: Callable[[str], object],
    ) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._say, self._note, self._error = say, note, error

    def read(self, prefill: str, status: Sequence[str]) -> str:
        text = self._line()
        while is_open(text) and (more := self._stdin.readline()):
            text += "\n" + _text(more)
        return text

    def _line(self) -> str:
        line = self._stdin.readline()
        if not line:
            raise EOFError
        return _text(line)

    def say(self, text: str) -> None:
        self._say(printable(text))

    def note(self, text: str) -> None:
        self._note(printable(text))

    def error(self, text: str) -> None:
        self._error(printable(text))

    def choose(self, question: str, choices: Mapping[str, str], default: str) -> str:
        return default

    @contextmanager
    def answer(self, tint: bool) -> Iterator[Write]:
        def write(piece: Piece) -> None:
            self._stdout.write(printable(piece.text))
            self._stdout.flush()

        try:
            yield write
        finally:
            self._stdout.write("\n")
            self._stdout.flush()

    def recall(self, question: str, answer: str) -> None:
        """Was written when it was said."""

    def legend(self) -> None:
        self.note("tint: colours need a terminal; here is none")

    def clear(self) -> None:
        """There is no screen."""


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").removeprefix("\ufeff").rstrip("\r\n")
