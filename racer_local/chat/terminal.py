"""A chat on a terminal: a line to edit at the bottom, answers as they grow above it."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.text import Text

from racer_local.chat.front import Write
from racer_local.chat.render import MarkdownWriter, TextWriter, legend
from racer_local.chat.texts import clean, is_open, printable
from racer_local.config import cache_home

if TYPE_CHECKING:
    from racer_local.chat.commands import Command

PROMPT = "> "
MENU_ROWS = 6
"""Rows below the input line that completions may take."""


class Terminal:
    """prompt_toolkit reads, rich writes."""

    interactive = True

    def __init__(self, commands: Mapping[str, Command], *, markdown: bool) -> None:
        self._console = Console(highlight=False)
        self._writer: MarkdownWriter | TextWriter | None = None
        """Of the answer that grows, if one does."""
        self._markdown = markdown and not self._console.is_dumb_terminal
        self._typed: PromptSession[str] = PromptSession(
            history=self._history(),
            completer=_Completer(commands),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation="  ",
            reserve_space_for_menu=MENU_ROWS,
        )

    def read(self, prefill: str, status: Sequence[str]) -> str:
        toolbar = (lambda: fitting(status, get_app().output.get_size().columns)) if status else None
        return clean(self._typed.prompt(PROMPT, default=prefill, bottom_toolbar=toolbar))

    def _history(self) -> History:
        try:
            return _History(cache_home() / "chat_history")
        except OSError as error:
            self.note(f"what you type is not kept for the next chat ({error})")
            return InMemoryHistory()

    def say(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def note(self, text: str) -> None:
        if self._writer:
            self._writer.above(printable(text))
        else:
            self._console.print(Text(printable(text), "dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(f"error: {printable(text)}", "red"))

    def choose(self, question: str, choices: Mapping[str, str], default: str) -> str:
        shown = ", ".join(f"[{letter}] {what}" for letter, what in choices.items())
        self._console.print(Text(printable(question)))
        asking: PromptSession[str] = PromptSession()
        try:
            while True:
                chosen = asking.prompt(f"{shown}: ").strip().lower()[:1]
                if chosen in choices:
                    return chosen
        except (KeyboardInterrupt, EOFError):
            return default

    @contextmanager
    def answer(self, tint: bool) -> Iterator[Write]:
        if self._markdown and not tint:
            self._writer = MarkdownWriter(self._console)
        else:
            self._writer = TextWriter(self._console, tint)
        with _silent_keys():
            try:
                yield self._writer.write
            finally:
                self._writer.close()
                self._writer = None
                self._console.print()

    def recall(self, question: str, answer: str) -> None:
        from racer_local.pieces import Piece

        self._console.print(Text(PROMPT + printable(question), "dim"))
        with self.answer(tint=False) as write:
            write(Piece(answer, []))

    def legend(self) -> None:
        self._console.print(legend(self._console))

    def clear(self) -> None:
        self._console.clear()


def fitting(parts: Sequence[str], width: int) -> str:
    """As many of the parts, the first ones first, as the width holds; the first in any case, in several lines."""
    line = ""
    for part in parts:
        longer = f"{line} · {part}" if line else part
        if len(longer) > width:
            return line or textwrap.fill(part, max(1, width))
        line = longer
    return line


class _History(FileHistory):
    """Readable by the user alone. A full disk costs a line of it, not the chat."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.close(file)
        os.chmod(path, 0o600)  # one of an earlier version, or of another program
        super().__init__(path)

    def store_string(self, string: str) -> None:
        try:
            super().store_string(clean(string))
        except OSError:
            return


class _Completer(Completer):
    """Names of commands, and what may follow them."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text[1:].partition(" ")
        if not space:
            for command in self._commands.values():
                if command.name.startswith(name):
                    yield Completion(command.name, -len(name), display=command.usage, display_meta=command.help)
        elif command := self._commands.get(name):  # type: ignore[assignment]
            if command.files:
                yield from self._paths.get_completions(Document(argument), complete_event)
            for choice in command.choices:
                if choice.startswith(argument):
                    yield Completion(choice, -len(argument))


def _keys() -> KeyBindings:
    keys = KeyBindings()
    typing = has_focus("DEFAULT_BUFFER")

    @keys.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        state = buffer.complete_state
        chosen = state.current_completion if state else None
        if chosen and chosen.display_text.endswith("/"):
            buffer.complete_state = None
            buffer.insert_text("/")  # a folder was chosen, and what is in it comes next
            buffer.start_completion()
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=typing)
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

    return keys


@contextmanager
def _silent_keys() -> Iterator[None]:
    """What is typed during an answer is not echoed into it; the next input line gets it."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    stdin = sys.stdin.fileno()
    before: list[Any] = termios.tcgetattr(stdin)
    silent = [*before]
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
