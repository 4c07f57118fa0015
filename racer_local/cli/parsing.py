"""How the commands read and what their --help looks like: usage, description, options, examples, exit status."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

WIDEST = 100
"""Columns of a help text, at most."""
Examples = Sequence[tuple[str, str]]
"""Command lines as they would be typed, and what each does."""
SOME_FAILED, INTERRUPTED = 3, 130
EXIT_CODES = {
    0: "done",
    1: "the system failed, or what was checked is not in order",
    2: "the command, a file or a setting is wrong; the message says what to change",
    SOME_FAILED: "run: done, but some lines could not be answered, or too many (--max-errors)",
    INTERRUPTED: "interrupted (Ctrl-C); what was done so far is kept or printed",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """-m, --model MODEL, in every version of Python."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line, and the usage names only what must be given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **settings})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def format_usage(self) -> str:
        return f"usage: {self._short_usage()}\n"

    def format_help(self) -> str:
        self.usage = self._short_usage().replace("%", "%%")
        return super().format_help()

    def _short_usage(self) -> str:
        must, places, may = [], [], False
        for action in self._actions:
            value = self._get_formatter()._format_args(action, action.metavar or action.dest.upper())  # type: ignore[arg-type]
            if not action.option_strings:
                places.append(value)
            elif action.required:
                must.append(f"{action.option_strings[0]} {value}")
            else:
                may = True
        return " ".join([self.prog, *must, *places, *(["[OPTIONS]"] if may else [])])


def add_command(
    commands: Any, name: str, *, help: str, description: str | None = None, examples: Examples = (), notes: str = ""
) -> Parser:
    """A command that runs, with examples. `notes`: paragraphs of what else its help says."""
    text = textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", _width())
    notes = "\n\n".join(
        textwrap.fill(" ".join(note.split()), _width(), subsequent_indent="  ") for note in notes.split("\n\n")
    )
    shown = "\n".join(f"  {line}\n      {what}" for line, what in examples)
    parser: Parser = commands.add_parser(
        name,
        help=help,
        description=text,
        epilog="\n\n".join(filter(None, (notes, f"examples:\n{shown}"))) if examples else notes,
    )
    parser.set_defaults(examples=tuple(line for line, _ in examples))
    return parser


def add_messages(parser: argparse.ArgumentParser) -> None:
    """The flags that every command has, at the end of its help."""
    said = parser.add_argument_group("messages")
    said.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    said.add_argument("--log-json", action="store_true", help="what goes to stderr as JSON, an object a line")


def exit_status() -> str:
    rows = "\n".join(f"  {code:<4} {what}" for code, what in EXIT_CODES.items())
    return f"exit status:\n{rows}"


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands that run."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not inner:
        yield parser
    for action in inner:
        for child in action.choices.values():
            yield from leaves(child)


def _width() -> int:
    return max(40, min(WIDEST, shutil.get_terminal_size().columns - 2))
