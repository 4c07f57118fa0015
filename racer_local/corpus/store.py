"""The file of an index: flat arrays that can be mapped into memory and never change once the file has its name.

A new state of an index is a new file, written under another name and put in the old one's place when it is whole. So
whoever is killed leaves the old index, and whoever has it open keeps what he opened.

Layout: a header of 32 bytes; the arrays of every segment (see `kernels.suffixes.Segment`) and a list of its files as
JSON, each from the beginning of a page on; at the end a table, JSON, which says where they are.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from racer_local.corpus.sorting import MOST_TOKENS, sort_positions
from racer_local.errors import CorpusError
from racer_local.kernels import suffixes
from racer_local.kernels.suffixes import ROW, STRIDE, Segment
from racer_local.text import VocabularyId
from racer_local.tree import Int32s

MAGIC = b"RACERIDX"
FORMAT = 1
HEADER = struct.Struct("<8sIIQQ")
"""Magic, format, CRC-32 of the table, where the table begins, bytes of the whole file."""
PAGE = 4096
SMALL = 16 << 20
"""Bytes of arrays up to which all of them are checked when a file is opened; of larger ones some places are."""
PROBES = 64
CHUNK = 1 << 20
ARRAYS = ("tokens", "order", "directory", "starts")


class File(NamedTuple):
    """Where a part of a segment's text is from."""

    name: str
    """The path, or what else it is called."""
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds since 1970."""
    tokens: int


@dataclass(frozen=True, eq=False)
class Part:
    """Text for a new segment."""

    tokens: Int32s
    """[n] the tokens of all files, BREAK behind each document, at the end of each file too."""
    files: list[File]
    order: Int32s | None = None
    """[n] see `Segment`; None where it is not sorted yet."""

    @cached_property
    def starts(self) -> Int32s:
        """[files + 1] where each file begins."""
        return np.cumsum([0, *(file.tokens for file in self.files)], dtype=np.int32)

    @classmethod
    def join(cls, parts: Sequence[Part]) -> Part:
        return cls(np.concatenate([part.tokens for part in parts]), [file for part in parts for file in part.files])


class Place(NamedTuple):
    """Where an array of a segment lies in the file."""

    at: int
    """Bytes from the beginning."""
    size: int
    """Numbers of four bytes; of a list of files: bytes."""
    crc: int


@dataclass
class Table:
    """What the end of the file says of the rest."""

    vocabulary: VocabularyId
    segments: list[dict[str, Place]] = field(default_factory=list)

    @classmethod
    def parse(cls, raw: bytes) -> Table:
        table = json.loads(raw)
        segments = [{name: Place(*place) for name, place in places.items()} for places in table["segments"]]
        return cls(VocabularyId(*table["vocabulary"]), segments)


class Store:
    """An open index file. What it holds stays the same, whatever becomes of the file's name.

    Raises CorpusError where the file is missing, damaged, cut short, of a newer format, or of another vocabulary than
    the `wanted` one.
    """

    def __init__(self, path: Path, wanted: VocabularyId | None = None) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            self.close = weakref.finalize(self, self._file.close)
            """What was mapped can still be read after it."""
            stat = os.fstat(self._file.fileno())
            self.identity, self.size = identity(stat), stat.st_size
            self._table = self._read_table()
        except OSError as error:
            raise CorpusError(f"the index {path} can't be read: {error.strerror}; check the path") from error
        self.vocabulary = self._table.vocabulary
        if wanted:
            self.demand(wanted)
        for places in self._table.segments:
            _check_places(path, places, self.size)
        if self.size <= SMALL:
            self.check()
        elif not all(map(self._agrees, range(self.n_segments))):
            raise _damaged(path)

    def demand(self, vocabulary: VocabularyId) -> None:
        """Raises CorpusError where the index is for another vocabulary."""
        if vocabulary.fingerprint != self.vocabulary.fingerprint:
            raise CorpusError(
                f"the index {self.path} was built for another vocabulary (that of {Path(self.vocabulary.model).name}, "
                f"{self.vocabulary.n_vocab} tokens); build one for this model"
            )

    @property
    def places(self) -> list[tuple[int, int, int, int]]:
        """For each segment what `kernels.suffixes.as_index` wants, valid while this object lives."""
        return [
            (self._file.fileno(), places["tokens"].at, places["tokens"].size, places["order"].at)
            for places in self._table.segments
        ]

    def segment(self, number: int) -> Segment:
        """Its arrays, mapped: what is touched of them is resident for as long as this object lives."""
        return Segment(*(self._mapped(places[name]) for places in [self._table.segments[number]] for name in ARRAYS))

    @property
    def segments(self) -> list[Segment]:
        return [self.segment(number) for number in range(self.n_segments)]

    def resident(self, name: str) -> list[Int32s]:
        """Copies of the array of this name, one for each segment."""
        return [self._read(places[name].at, places[name].size) for places in self._table.segments]

    @property
    def n_segments(self) -> int:
        return len(self._table.segments)

    def length(self, number: int) -> int:
        """Tokens of a segment."""
        return self._table.segments[number]["tokens"].size

    @property
    def n_tokens(self) -> int:
        return sum(map(self.length, range(self.n_segments)))

    def files(self, number: int) -> list[File]:
        """Of a segment, in the order in which they lie in it."""
        place = self._table.segments[number]["files"]
        raw = self._read_bytes(place.at, place.size)
        if zlib.crc32(raw) != place.crc:
            raise _damaged(self.path)
        return [File(*entry) for entry in json.loads(raw)]

    @property
    def all_files(self) -> list[File]:
        return [file for number in range(self.n_segments) for file in self.files(number)]

    def part(self, number: int) -> Part:
        """A segment's text and its order, checked, for a new file."""
        places = self._table.segments[number]
        self._check(places["tokens"], places["order"])
        return Part(self._mapped(places["tokens"]), self.files(number), self._mapped(places["order"]))

    def check(self) -> None:
        """Read all of it. Raises CorpusError where something has changed."""
        for number, places in enumerate(self._table.segments):
            self._check(*(places[name] for name in ARRAYS))
            self.files(number)

    def copy(self, number: int, write: Callable[[Any], object], to: Callable[[], int]) -> dict[str, Place]:
        """A segment as it is, checked on the way. `to` makes room for an array and tells where that is."""
        places = {}
        for name, place in self._table.segments[number].items():
            places[name] = Place(to(), place.size, place.crc)
            crc = 0
            for chunk in self._chunks(place.at, place.size if name == "files" else 4 * place.size):
                crc = zlib.crc32(chunk, crc)
                write(chunk)
            if crc != place.crc:
                raise _damaged(self.path)
        return places

    @cached_property
    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def _mapped(self, place: Place) -> Int32s:
        if not place.size:
            return np.zeros(0, np.int32)
        return np.frombuffer(self._map, np.int32, place.size, place.at)

    def _read_bytes(self, at: int, size: int) -> bytes:
        self._file.seek(at)
        return self._file.read(size)

    def _read(self, at: int, count: int) -> Int32s:
        return np.frombuffer(self._read_bytes(at, 4 * count), np.int32)

    def _chunks(self, at: int, size: int) -> Iterator[bytes]:
        for start in range(at, at + size, CHUNK):
            yield self._read_bytes(start, min(CHUNK, at + size - start))

    def _check(self, *places: Place) -> None:
        for place in places:
            crc = 0
            for chunk in self._chunks(place.at, 4 * place.size):
                crc = zlib.crc32(chunk, crc)
            if crc != place.crc:
                raise _damaged(self.path)

    def _read_table(self) -> Table:
        path, header = self.path, self._read_bytes(0, HEADER.size)
        if len(header) < HEADER.size:
            raise CorpusError(f"{path} is no index, or cut short: it is smaller than an index's header; build it again")
        magic, format, crc, at, size = HEADER.unpack(header)
        if magic != MAGIC:
            raise CorpusError(f"{path} is no index of racer-local; make one with: racer-local index build")
        if format > FORMAT:
            raise CorpusError(
                f"the index {path} has format {format}, and this version reads up to {FORMAT}; update racer-local"
            )
        if format < FORMAT:
            raise _damaged(path)
        if size > self.size:
            raise CorpusError(f"the index {path} is cut short ({self.size} of {size} bytes); copy or build it again")
        raw = self._read_bytes(at, size - at) if HEADER.size <= at <= size else b""
        if not raw or zlib.crc32(raw) != crc:
            raise _damaged(path)
        try:
            return Table.parse(raw)
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(path) from error

    def _agrees(self, number: int) -> bool:
        """Whether some entries of the directory say what the arrays say: pages that were lost are zeros."""
        places = self._table.segments[number]
        n = places["tokens"].size
        for entry in np.unique(np.linspace(0, (n - 1) // STRIDE, PROBES).astype(np.int64)).tolist():
            row = self._read(places["directory"].at + 4 * ROW * entry, ROW)
            (position,) = self._read(places["order"].at + 4 * STRIDE * entry, 1).tolist()
            if not (position == row[-1] and 0 <= position < n):
                return False
            if self._read(places["tokens"].at + 4 * position, 1)[0] != row[0]:
                return False
        return True


def identity(stat: os.stat_result) -> tuple[int, ...]:
    """What tells one state of an index from the next."""
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def write_store(path: Path, vocabulary: VocabularyId, kept: Sequence[tuple[Store, int]], parts: Sequence[Part]) -> None:
    """Put an index of these segments of open files, and of these new parts, in the place of `path`.

    Readable by its owner alone. Raises CorpusError where a part is too large, OSError where the disk is full.
    """
    with _replacing(path) as file:
        file.write(bytes(HEADER.size))
        table = Table(vocabulary)
        for store, number in kept:
            table.segments.append(store.copy(number, file.write, lambda: _to_page(file)))
        for part in parts:
            table.segments.append(_sort(file, part, path))
        raw = json.dumps(asdict(table)).encode()
        at = _to_page(file)
        file.write(raw)
        size = file.tell()
        file.seek(0)
        file.write(HEADER.pack(MAGIC, FORMAT, zlib.crc32(raw), at, size))


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the body has come to its end, and is gone otherwise."""
    path = path.resolve()  # a link stays one
    remove_leftovers(path)
    with NamedTemporaryFile("wb", dir=path.parent, prefix=_prefix(path), suffix=".part", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(file.name, path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    with suppress(OSError):  # so that a power cut after this finds the new name; not every system can
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_leftovers(path: Path) -> None:
    """What killed writers of this index left. Whoever calls holds its lock."""
    for part in path.parent.iterdir():
        start, _, random = part.name.removesuffix(".part").rpartition(".")
        if f"{start}." == _prefix(path) and part.name == f"{start}.{random}.part":
            part.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}."


def _sort(file: IO[bytes], part: Part, path: Path) -> dict[str, Place]:
    n = len(part.tokens)
    if n > MOST_TOKENS:
        raise CorpusError(
            f"{path} would hold {n} tokens in one piece, and {MOST_TOKENS} can be sorted; use --max-tokens"
        )
    order = sort_positions(part.tokens) if part.order is None else part.order
    directory = np.zeros(-(-n // STRIDE) * ROW, np.int32)
    suffixes.write_directory(part.tokens, order, directory)
    arrays: tuple[Int32s, ...] = (part.tokens, order, directory, part.starts)
    places = {name: _write(file, array) for name, array in zip(ARRAYS, arrays, strict=True)}
    places["files"] = _write(file, np.frombuffer(json.dumps(part.files).encode(), np.uint8))
    return places


def _write(file: IO[bytes], array: NDArray[Any]) -> Place:
    place = Place(_to_page(file), len(array), _crc(array))
    file.write(array.data)
    return place


def _crc(array: NDArray[Any]) -> int:
    return zlib.crc32(array.data)


def _to_page(file: IO[bytes]) -> int:
    """Fill the page up, so that the next array begins with one; returns where that is."""
    file.write(bytes(-file.tell() % PAGE))
    return file.tell()


def _check_places(path: Path, places: dict[str, Place], size: int) -> None:
    counts = {name: place.size for name, place in places.items()}
    n = counts["tokens"]
    inside = all(place.at >= 0 and place.at + 4 * place.size <= size for place in map(places.__getitem__, ARRAYS))
    whole = counts["order"] == n and counts["directory"] == -(-n // STRIDE) * ROW and counts["starts"] > 0
    if not (inside and whole):
        raise _damaged(path)


def _damaged(path: Path) -> CorpusError:
    return CorpusError(f"the index {path} is damaged; build it again, or copy it again from where it came")
