"""What a line of input is, and which characters of a text may reach a terminal."""

from __future__ import annotations

import re
from typing import NamedTuple

QUOTES = '"""'
"""Around a message of several lines, whatever it begins with."""
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Message(NamedTuple):
    """Text for the model."""

    text: str


class Call(NamedTuple):
    """A slash command."""

    name: str
    argument: str


def parse(text: str) -> Message | Call:
    """What was typed: `/name argument` is a command, `//` begins a message with one slash.

    >>> parse("/temp 0.8"), parse("//etc is a folder")
    (Call(name='temp', argument='0.8'), Message(text='/etc is a folder'))
    """
    if text.startswith(QUOTES):
        return Message(text[len(QUOTES) :].removesuffix(QUOTES).strip("\n"))
    if text.startswith("//"):
        return Message(text[1:])
    if not text.startswith("/"):
        return Message(text)
    name, *rest = text[1:].split(maxsplit=1) or [""]
    return Call(name, rest[0].rstrip() if rest else "")


def typed_as(text: str) -> str:
    """What is to be typed so that the model gets this text."""
    return f"{QUOTES}{text}{QUOTES}" if text.startswith(QUOTES) else "/" + text if text.startswith("/") else text


def is_open(text: str) -> bool:
    """Whether a block of several lines has begun and not ended."""
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.rstrip().endswith(QUOTES))


def clean(text: str) -> str:
    """Text that UTF-8 can hold; bytes that were none become a replacement character."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def printable(text: str) -> str:
    """Without what could steer a terminal: control characters but line feeds and tabs, escapes above all."""
    return _CONTROLS.sub("", text)


def shortened(text: str, width: int = 60) -> str:
    """The beginning of a text in one line."""
    line = " ".join(printable(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"
