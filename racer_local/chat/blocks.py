"""Where growing Markdown can be cut: what stands before the cut will look the same whatever comes after it."""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_FENCE = re.compile(r"^ *(?:[-*+>] +|\d+[.)] +)*(`{3,}|~{3,})(.*)$")
_CLOSE = re.compile(r"^\s*(`{3,}|~{3,})\s*$")
_ITEM = re.compile(r"^ {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)")
_HEADING = re.compile(r"^ {0,3}#{1,6}(?:\s|$)")


class Split(NamedTuple):
    """Blocks that are finished, each as it was written, and the text of the one that still grows."""

    finished: list[str]
    rest: str


def split(text: str) -> Split:
    """Finished blocks end with a blank line, a closed code fence or a heading's line; a list with what follows it.

    >>> split("One.\\n\\nTw")
    Split(finished=['One.\\n\\n'], rest='Tw')
    """
    finished: list[str] = []
    start = at = 0
    fence = ""
    in_list = blank = False
    for line in _LINE.findall(text):
        whole = line.endswith("\n")
        if fence:
            closed = _CLOSE.match(line) if whole else None
            if closed and closed[1].startswith(fence):
                fence = ""
                if not in_list:
                    finished.append(text[start : at + len(line)])
                    start = at + len(line)
        elif not line.strip():
            blank = at > start
            if blank and whole and not in_list and text[start:at].strip():
                finished.append(text[start : at + len(line)])
                start, blank = at + len(line), False
        else:
            if in_list and blank and not (line[0].isspace() or _may_be_item(line, whole)):
                finished.append(text[start:at])
                start, in_list = at, False
            in_list, blank = in_list or bool(_ITEM.match(line) and not text[start:at].strip()), False
            opened = _FENCE.match(line.rstrip("\n"))
            if opened and not (opened[1][0] == "`" and "`" in opened[2]):
                if not in_list and text[start:at].strip():
                    finished.append(text[start:at])
                    start = at
                fence = opened[1]
            elif whole and _HEADING.match(line) and not in_list:
                finished.append(text[start : at + len(line)])
                start = at + len(line)
        at += len(line)
    return Split(finished, text[start:])


def _may_be_item(line: str, whole: bool) -> bool:
    """Whether the line begins a list's item, or may yet do so when more of it comes."""
    return bool(_ITEM.match(line)) or (not whole and bool(re.fullmatch(r"[-*+]|\d{1,9}[.)]?", line)))


class Cut(NamedTuple):
    """A block that still grows in two: what can stand alone, and the rest, which goes on right below it."""

    head: str
    rest: str


def cut(block: str) -> Cut | None:
    """A long list before its last item, or an open code fence between two of its lines, which is opened again.

    None where it can't be cut so that both parts look as they would in the whole.

    >>> cut("- a\\n- b\\n- c")
    Cut(head='- a\\n- b\\n', rest='- c')
    """
    lines = _LINE.findall(block)
    if not lines:
        return None
    return _cut_fence(lines) if is_code(block) else _cut_list(lines) if _ITEM.match(lines[0]) else None


def is_code(block: str) -> bool:
    """Whether it begins with a code fence that stands in no list."""
    return bool(re.match(r" {0,3}(`{3,}(?=[^`\n]*$)|~{3,})", block, re.MULTILINE))


def _cut_fence(lines: list[str]) -> Cut | None:
    for at in range(len(lines) - 1, 1, -1):
        if lines[at].strip() and lines[at - 1].strip():  # empty lines at the ends of code are not shown
            return Cut("".join(lines[:at]), "".join([lines[0], *lines[at:]]))
    return None


def _cut_list(lines: list[str]) -> Cut | None:
    indent = _indent(lines[0])
    last, fence = 0, ""
    for at, line in enumerate(lines):
        marks = _FENCE.match(line.rstrip("\n"))
        if fence:
            closed = marks and marks[1].startswith(fence) and not marks[2].strip()
            fence = "" if closed else fence
            continue
        if _ITEM.match(line) and _indent(line) == indent:
            last = at
        fence = marks[1] if marks else ""
    return Cut("".join(lines[:last]), "".join(lines[last:])) if last else None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
