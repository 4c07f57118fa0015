"""From files to the text of a segment: read, tokenized in parallel, spooled to the disk in the order of the files."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple, Protocol

import numpy as np

from racer_local.config import usable_cpus
from racer_local.corpus.files import EMPTY, Found, NotText, Piece, pieces
from racer_local.corpus.store import File, Part
from racer_local.kernels.history import BREAK
from racer_local.kernels.suffixes import ROW, STRIDE
from racer_local.tree import Int32s

BEYOND_CAP = "beyond --max-tokens"
AHEAD = 32
"""Pieces that are read before the first of them is tokenized."""
SAMPLES, SAMPLE_CHARACTERS = 16, 1 << 16
RESIDENT_BYTES = 4 * ROW / STRIDE
"""Of memory for a token of an index that is used."""
DISK_BYTES = 8 + RESIDENT_BYTES
"""Of a token in an index."""
BUILDING_BYTES = 19
"""Of memory for a token while its segment is sorted, at most, the tokens included."""

Report = Callable[[int], object]
"""Hears of characters that were tokenized."""


class Tokenizer(Protocol):
    """What text becomes tokens with; several threads call it at once."""

    def plain_tokens(self, text: str, *, inside: bool = False) -> Int32s:
        """Token ids; BREAK in the place of control and end tokens. inside: the text goes on behind a line's end."""
        ...


@dataclass(frozen=True)
class Size:
    """What an index of some files will take, about."""

    files: int
    bytes: int
    tokens: int

    @property
    def disk(self) -> int:
        return int(DISK_BYTES * self.tokens)

    @property
    def memory(self) -> int:
        """While it is built."""
        return BUILDING_BYTES * self.tokens

    @property
    def resident(self) -> int:
        """While it is used."""
        return int(RESIDENT_BYTES * self.tokens)


def estimate(files: Sequence[Found], tokenizer: Tokenizer, *, chat: bool, max_tokens: int | None) -> Size:
    """From the beginnings of some files."""
    total, taken, tokens = sum(found.size for found in files), 0, 0
    for i in range(min(SAMPLES, len(files))):
        try:
            piece = next(pieces(files[i * len(files) // min(SAMPLES, len(files))], chat=chat, skipped=Counter()))
        except NotText:
            continue
        text = piece.text[:SAMPLE_CHARACTERS]
        taken += len(text.encode("utf-8", "surrogatepass"))
        tokens += len(tokenizer.plain_tokens(text))
    expected = total * tokens // taken if taken else 0
    return Size(len(files), total, expected if max_tokens is None else min(expected, max_tokens))


class _Event(NamedTuple):
    """A piece of a file on its way through the tokenizer, or the file's end, or why it is left out."""

    found: Found
    tokens: Future[Int32s] | None = None
    piece: Piece | None = None
    reason: str | None = None


def collect(
    files: Iterable[Found],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    chat: bool,
    max_tokens: int | None,
    skipped: Counter[str],
    report: Report = lambda characters: None,
) -> Part:
    """The text of the files, mapped from a file without a name in `folder`. Reasons for what is left out are counted.

    The file in which `max_tokens` are reached is cut there, what comes after it is left out.
    """
    spool = _Spool(TemporaryFile(dir=folder), max_tokens)  # noqa: SIM115  (part() closes it)
    waiting: deque[_Event] = deque()

    def take(most_left: int) -> None:
        while len(waiting) > most_left:
            spool.take(waiting.popleft(), skipped, report)

    def is_full() -> bool:
        """Known only when all has been taken: what filled it may turn out to be no text."""
        if spool.is_full:
            take(0)
        return spool.is_full

    with ThreadPoolExecutor(usable_cpus()) as pool:
        for event in _events(files, tokenizer, pool, chat, skipped, is_full):
            waiting.append(event)
            take(AHEAD)
        take(0)
    return spool.part()


def _events(
    files: Iterable[Found],
    tokenizer: Tokenizer,
    pool: ThreadPoolExecutor,
    chat: bool,
    skipped: Counter[str],
    is_full: Callable[[], bool],
) -> Iterator[_Event]:
    for found in files:
        if is_full():
            yield _Event(found, reason=BEYOND_CAP)
            continue
        try:
            for piece in pieces(found, chat=chat, skipped=skipped):
                if is_full():
                    break
                yield _Event(found, pool.submit(tokenizer.plain_tokens, piece.text, inside=not piece.begins), piece)
        except NotText as error:
            yield _Event(found, reason=str(error))
        else:
            yield _Event(found)


class _Spool:
    """Tokens on the disk, and where they are from."""

    def __init__(self, file: IO[bytes], max_tokens: int | None) -> None:
        self._file, self._files = file, list[File]()
        self._most = max_tokens
        self._length = self._start = 0
        """Tokens so far, and those before the file that is being read."""

    @property
    def is_full(self) -> bool:
        return self._most is not None and self._length >= self._most - 1

    def take(self, event: _Event, skipped: Counter[str], report: Report) -> None:
        if event.tokens is not None and event.piece is not None:
            if event.piece.begins and self._length > self._start:
                self._write(np.array([BREAK], np.int32))
            self._write(event.tokens.result())
            report(len(event.piece.text))
        elif event.reason is None and self._length > self._start:
            self._end(event.found)
        else:
            skipped[event.reason or (BEYOND_CAP if self.is_full else EMPTY)] += 1
            self._length = self._start
            self._file.seek(4 * self._start)

    def _write(self, tokens: Int32s) -> None:
        if self._most is not None:
            tokens = tokens[: max(0, self._most - 1 - self._length)]  # the last one is the BREAK at the end
        self._file.write(tokens.tobytes())
        self._length += len(tokens)

    def _end(self, found: Found) -> None:
        self._file.write(np.array([BREAK], np.int32).tobytes())
        self._length += 1
        self._files.append(File(str(found.path), found.size, found.modified, self._length - self._start))
        self._start = self._length

    def part(self) -> Part:
        with self._file:  # the map outlives it
            self._file.truncate(4 * self._start)
            self._file.flush()
            if not self._start:
                return Part(np.zeros(0, np.int32), [])
            return Part(np.memmap(self._file, np.int32, "r", shape=(self._start,)), self._files)
