"""Finds the text files of a user's folders, as git would see them, and reads their text piece by piece."""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec
from pathspec.pattern import RegexPattern

from racer_local.errors import ConfigError

IGNORED = "ignored by .gitignore"
FOLDER_IGNORED = "folder ignored by .gitignore"
TOO_LARGE = "over the size limit"
LINKS = "symbolic links"
NOT_REGULAR = "not regular files"
EMPTY = "empty"
UNREADABLE = "unreadable"
BINARY = "binary"
NOT_UTF8 = "not UTF-8 text"
NOT_CHAT = "not a chat log"
BAD_LINES = "chat lines without messages"

FOLDER_MARK = "ps_d"
"""The group in a pathspec's regex for the slash behind a folder."""
BLOCK = 1 << 20
"""Bytes read at once, and about the length of a piece."""


@dataclass(frozen=True)
class Found:
    """A file that was there, and what to know it by later."""

    path: Path
    """Absolute and real: no link in what was named is left in it."""
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds, `st_mtime_ns`."""


@dataclass(frozen=True)
class Piece:
    """A part of a text, long enough to be worth a call and short enough for memory."""

    text: str
    begins: bool
    """Whether it begins a document: nothing before it belongs to it."""


class NotText(Exception):
    """A file has no text to give. The message is one of this module's reasons; pieces already given are void."""


# Finding


def walk(paths: Sequence[Path], *, max_bytes: int, skipped: Counter[str]) -> Iterator[Found]:
    """Each file of these files and folders once, folders in sorted order; what is left out is counted by its reason.

    What is named is taken even if it is ignored or a link. Raises ConfigError, at the call, if a path is not there.
    """
    for path in paths:
        if not os.path.exists(path):
            raise ConfigError(f"no such file or folder: {os.fspath(path)!r}; name one that exists")
    return _walk(list(dict.fromkeys(os.path.realpath(path) for path in paths)), max_bytes, skipped)


def _walk(named: Sequence[str], max_bytes: int, skipped: Counter[str]) -> Iterator[Found]:
    elsewhere = frozenset(named)
    for path in named:
        folders = [(path, _rules_above(path))] if os.path.isdir(path) else []
        if not folders and (found := _judge(path, _stat(path), max_bytes, skipped)):
            yield found
        while folders:
            folder, above = folders.pop()
            rules = _rules_in(folder, above)
            inner = []
            for entry in _scan(folder, skipped):
                if entry.name == ".git" or entry.path in elsewhere:  # what is named too comes in its own turn
                    continue
                status = _stat(entry.path)
                is_folder = status is not None and stat.S_ISDIR(status.st_mode)
                if _ignored(entry.path, is_folder, rules):
                    skipped[FOLDER_IGNORED if is_folder else IGNORED] += 1
                elif is_folder:
                    inner.append((entry.path, rules))
                elif found := _judge(entry.path, status, max_bytes, skipped):
                    yield found
            folders += reversed(inner)


def _scan(folder: str, skipped: Counter[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        skipped[UNREADABLE] += 1
        return []


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _judge(path: str, status: os.stat_result | None, max_bytes: int, skipped: Counter[str]) -> Found | None:
    """The file, or None and one more for the reason why not."""
    if status is None:
        reason = UNREADABLE
    elif stat.S_ISLNK(status.st_mode):
        reason = LINKS
    elif not stat.S_ISREG(status.st_mode):
        reason = NOT_REGULAR
    elif not status.st_size:
        reason = EMPTY
    elif status.st_size > max_bytes:
        reason = TOO_LARGE
    else:
        return Found(Path(path), status.st_size, status.st_mtime_ns)
    skipped[reason] += 1
    return None


# What git ignores


class _Rules:
    """The lines of one ignore file. The last one that matches a name decides."""

    def __init__(self, folder: str, lines: Sequence[RegexPattern]) -> None:
        self._folder = folder
        self._lines = lines
        self._start = len(os.path.join(folder, ""))

    def verdict(self, path: str, is_folder: bool) -> bool | None:
        """Whether it is ignored; None if no line says anything on it."""
        name = path[self._start :].replace(os.sep, "/")
        matching = (line for line in reversed(self._lines) if name and _matches(line, name, is_folder))
        return next((line.include for line in matching), None)

    def without(self, folders: Iterable[str]) -> _Rules:
        """Those lines that do not ignore any of these folders."""
        names = list(folders)
        kept = [
            line for line in self._lines if not any(_Rules(self._folder, [line]).verdict(name, True) for name in names)
        ]
        return _Rules(self._folder, kept)


def _matches(line: RegexPattern, name: str, is_folder: bool) -> bool:
    """Whether a line matches this very name. A pathspec also matches what lies in a folder that it matches, and marks
    the folder's slash; but whether to enter that has been decided."""
    regex = line.regex
    assert regex is not None
    match = regex.search(name)
    if match and not match.groupdict().get(FOLDER_MARK):
        return True
    ends = (match.end(FOLDER_MARK) for match in regex.finditer(name + "/") if FOLDER_MARK in match.groupdict())
    return is_folder and len(name) + 1 in ends


def _ignored(path: str, is_folder: bool, rules: Sequence[_Rules]) -> bool:
    """What the innermost ignore file says that says anything. Its parents are known not to be ignored."""
    verdicts = (each.verdict(path, is_folder) for each in reversed(rules))
    return next((verdict for verdict in verdicts if verdict is not None), False)


def _rules_in(folder: str, above: tuple[_Rules, ...]) -> tuple[_Rules, ...]:
    """The rules that hold in a folder, innermost last. A repository knows nothing of one around it."""
    if os.path.lexists(os.path.join(folder, ".git")):
        above = _read_rules(folder, os.path.join(".git", "info", "exclude"))
    return above + _read_rules(folder, ".gitignore")


def _rules_above(folder: str) -> tuple[_Rules, ...]:
    """The rules of the repository around a folder that was named; those that ignore the folder do not hold in it."""
    way = [folder]
    while not os.path.lexists(os.path.join(way[-1], ".git")):
        parent = os.path.dirname(way[-1])
        if parent == way[-1]:
            return ()
        way.append(parent)
    rules: tuple[_Rules, ...] = ()
    for parent in reversed(way[1:]):
        rules = _rules_in(parent, rules)
    if any(_ignored(each, True, rules) for each in way):
        return tuple(each.without(way) for each in rules)
    return rules


def _read_rules(folder: str, name: str) -> tuple[_Rules, ...]:
    """The rules of one file, or nothing: like git, it minds neither a missing nor an odd one and follows no link."""
    path = os.path.join(folder, name)
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return ()
        with open(path, "rb") as file:
            text = os.fsdecode(file.read().removeprefix(codecs.BOM_UTF8))
    except OSError:
        return ()
    rules = [rule for line in text.split("\n") for rule in _rule(line.removesuffix("\r"))]
    return (_Rules(folder, rules),) if rules else ()


def _rule(line: str) -> list[RegexPattern]:
    """What a line of an ignore file says; nothing where it is a comment, or odd."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of brackets that a later Python may read otherwise
            patterns = GitIgnoreSpec.from_lines([line]).patterns
    except (ValueError, re.error):
        return []
    return [pattern for pattern in patterns if isinstance(pattern, RegexPattern) and pattern.include is not None]


# Reading


def pieces(found: Found, *, chat: bool, skipped: Counter[str]) -> Iterator[Piece]:
    """The file's text, a block at a time; with `chat` a .jsonl file's messages, each a document.

    Joined, the pieces of a document are its text. Raises NotText, maybe after some pieces.
    """
    if chat and found.path.name.lower().endswith(".jsonl"):
        yield from _chat(found.path, skipped)
    else:
        yield from _document(_decoded(found.path, by_line=False))


def _document(texts: Iterable[str]) -> Iterator[Piece]:
    """One text, that comes in any parts, as pieces. Raises NotText if it is but white space."""
    blank, begins = True, True
    for text in _cut(texts):
        blank = blank and text.isspace()
        yield Piece(text, begins)
        begins = False
    if blank:
        raise NotText(EMPTY)


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """The same text in parts of about BLOCK characters that end behind a line; a far longer line is cut anywhere."""
    held = ""
    for text in texts:
        for start in range(0, len(text), BLOCK):
            held += text[start : start + BLOCK]
            end = _seam(held) if len(held) >= BLOCK else 0
            if len(held) >= 2 * BLOCK:
                end = end or held.rfind("\n") + 1 or len(held)
            if end:
                yield held[:end]
                held = held[end:]
    if held:
        yield held


def _seam(text: str) -> int:
    """Behind the last newline before a character that is no white space; 0 if there is none.

    A tokenizer that joins newlines and indentation gives the same tokens there as in one go.
    """
    end = text.rfind("\n", 0, -1)
    while end >= 0 and text[end + 1].isspace():
        end = text.rfind("\n", 0, end)
    return end + 1


def _decoded(path: Path, *, by_line: bool) -> Iterator[str]:
    """The text in blocks or lines. A last line, but no last block, may end in half a character, which is left out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with open(path, "rb") as file:
            for block in file if by_line else iter(lambda: file.read(BLOCK), b""):
                if b"\0" in block:
                    raise NotText(BINARY)
                yield decoder.decode(block)
        if not by_line:
            decoder.decode(b"", final=True)
    except OSError as error:
        raise NotText(UNREADABLE) from error
    except UnicodeDecodeError as error:
        raise NotText(NOT_UTF8) from error


def _chat(path: Path, skipped: Counter[str]) -> Iterator[Piece]:
    """The messages of a log that may still be written to: lines that are no messages are counted, and passed over."""
    lines = bad = messages = documents = 0
    for line in _decoded(path, by_line=True):
        if not line.strip():
            continue
        lines += 1
        try:
            texts = _messages(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            bad += 1
            continue
        messages += len(texts)
        for text in texts:
            if text and not text.isspace():
                documents += 1
                yield from _document([text])
    if lines and not messages:
        raise NotText(NOT_CHAT)
    if not documents:
        raise NotText(EMPTY)
    if bad:
        skipped[BAD_LINES] += bad


def _messages(line: Any) -> list[str]:
    """The text of each message. Raises TypeError if there is a thing of another shape."""
    if not isinstance(line, dict):
        raise TypeError
    messages = line.get("messages", [line])
    if not isinstance(messages, list):
        raise TypeError
    return [_text(message) for message in messages]


def _text(message: Any) -> str:
    """A message's text, its parts in lines of their own as llama.cpp joins them; "" if it has none."""
    if not isinstance(message, dict) or "role" not in message:
        raise TypeError
    content = message.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        content = "\n".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise TypeError
    return re.sub("[\ud800-\udfff]", "\ufffd", content or "")  # JSON can escape half a character; UTF-8 can't hold it
