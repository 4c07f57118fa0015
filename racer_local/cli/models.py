"""`racer-local models`: which models can be had by name, fetching them, and where they lie."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, TextIO

from racer_local import models
from racer_local.cli import messages
from racer_local.cli.parsing import add_command
from racer_local.models import Entry, Progress, readable_size

LIST_EXAMPLES = (("racer-local models list --json", "names, sizes, licences, and where the files are"),)
FETCH_EXAMPLES = (("racer-local models fetch smollm2-135m", "98 MB; an interrupted download goes on where it stopped"),)
PATH_EXAMPLES = (("racer-local models path smollm2-135m", "for other programs that read GGUF files"),)
REDRAW_S = 0.1
WIDTH = 24
STEP_BYTES = 50_000_000
"""Without a terminal, bytes from line to line when nobody knows the total."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("models", help="list and fetch models", description="Models by name.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    what = "all known models and whether they are here"
    listing = add_command(actions, "list", help=what, examples=LIST_EXAMPLES)
    listing.add_argument("--json", action="store_true", help="for machines")
    listing.set_defaults(run=run_list)
    fetching = add_command(actions, "fetch", help="get a model; prints its path", examples=FETCH_EXAMPLES)
    fetching.add_argument("name", metavar="NAME", help="see: racer-local models list")
    fetching.set_defaults(run=run_fetch)
    path = add_command(actions, "path", help="print the path of a fetched model", examples=PATH_EXAMPLES)
    path.add_argument("name", metavar="NAME")
    path.set_defaults(run=run_path)


def run_list(args: argparse.Namespace) -> int:
    entries = list(models.load_registry().values())
    if args.json:
        print(json.dumps([_record(entry) for entry in entries], indent=2))
    else:
        print(_table([("NAME", "SIZE", "LICENCE", "STATE", "DESCRIPTION"), *map(_row, entries)]))
    return 0


def run_fetch(args: argparse.Namespace) -> int:
    entry = models.entry_of(args.name)
    bar = ProgressBar(sys.stderr) if messages.drawing() else None
    if bar and not entry.fetched:
        bar.note(f"{entry.name}: {readable_size(entry.size)}, licence: {entry.licence} ({entry.licence_url})")
    try:
        path = models.fetch(entry.name, bar)
    finally:
        if bar:
            bar.close()
    print(path)
    return 0


def run_path(args: argparse.Namespace) -> int:
    print(models.find(args.name))
    return 0


def _record(entry: Entry) -> dict[str, Any]:
    fields = ("name", "size", "licence", "licence_url", "sha256", "description", "fetched")
    return {**{field: getattr(entry, field) for field in fields}, "path": str(entry.path)}


def _row(entry: Entry) -> tuple[str, ...]:
    state = "here" if entry.fetched else "not fetched"
    return entry.name, readable_size(entry.size), entry.licence, state, entry.description


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


class ProgressBar(Progress):
    """Bytes, percent, rate and time left: one line redrawn on a terminal, else a line each 10 %."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._drawn = 0
        self._first: tuple[float, int] | None = None
        self._next_s = 0.0
        self._step = 0

    def note(self, text: str) -> None:
        """Prints a line. What follows counts as a new download, with a rate of its own."""
        self.close()
        print(text, file=self._out, flush=True)
        self._first = None

    def advance(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        step = done * 10 // total if total else done // STEP_BYTES
        if self._first is None:
            # A resumed download starts beyond 0; the rate counts only what came since.
            self._first, self._next_s, self._step = (now, done), 0.0, step
        if (now >= self._next_s or done == total) if self._terminal else step != self._step:
            self._next_s, self._step = now + REDRAW_S, step
            started, base = self._first
            rate = (done - base) / (now - started) if now > started else 0.0
            self._draw(_progress_line(done, total, rate))

    def close(self) -> None:
        """Leaves the drawn line; the cursor goes below it."""
        if self._drawn:
            print(file=self._out, flush=True)
        self._drawn = 0

    def _draw(self, line: str) -> None:
        if self._terminal:
            print(f"\r{line.ljust(self._drawn)}", end="", file=self._out, flush=True)
            self._drawn = len(line)
        else:
            print(line, file=self._out, flush=True)


def _progress_line(done: int, total: int | None, rate: float) -> str:
    speed = f"{readable_size(int(rate))}/s" if rate else ""
    if not total:
        return f"{readable_size(done)}  {speed}".rstrip()
    filled = WIDTH * done // total
    seconds = int((total - done) / rate) if rate and done < total else None
    left = "" if seconds is None else f"{seconds // 60}:{seconds % 60:02d} left"
    bar = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {100 * done // total:3d}%"
    return f"{bar}  {readable_size(done)} of {readable_size(total)}  {speed}  {left}".rstrip()
