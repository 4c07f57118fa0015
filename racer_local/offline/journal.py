"""Answers as they come, safe on the disk: a file beside the output that is appended to, and becomes the output.

Its first line says what the answers depend on, each further one holds a record and which line of the input it answers.
A record counts when its line is whole; what a kill left half written is cut off.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from racer_local.errors import ConfigError

FORMAT = 1
SUFFIX = ".part"
MARK = b'{"racer_local_run"'
"""Every journal begins with it."""


class Journal:
    """The records of a run that may end at any moment.

    `answered`: by the number of an input line its digest and the place of its record; `failed`: the numbers of those
    whose record is an error. Closing twice is harmless.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Raises ConfigError where another run works on it, where one was left unfinished or finished and it is not
        said what to do about it, and where one with other settings is to be gone on with."""
        self.output, self.path, lock = self.files(output)
        self.answered: dict[int, tuple[str, int]] = {}
        self.failed: set[int] = set()
        if self.output.exists() and not self.output.is_file():
            raise ConfigError(f"{output} is no regular file; name another, or - for stdout")
        self._lock = FileLock(lock)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError(f"another run is writing {output}; wait for it, or name another file") from error
        try:
            self._open(settings, resume, overwrite)
        except BaseException:
            self._unlock()
            raise

    @staticmethod
    def files(output: Path) -> tuple[Path, Path, Path]:
        """All that are written: the output itself, its journal, and its lock."""
        output = Path(os.path.realpath(output))  # a link stays one
        return output, output.with_name(output.name + SUFFIX), output.with_name(output.name + SUFFIX + ".lock")

    def _open(self, settings: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
        there = self.path.exists() and self.path.stat().st_size > 0
        if there and not (resume or overwrite):
            raise ConfigError(
                f"{self.path} is of a run that did not end, or had errors; go on with --resume, or use --overwrite"
            )
        if self.output.exists() and not (overwrite or there):
            raise ConfigError(f"{self.output} is there already; name another file, or use --overwrite")
        self._header = {"racer_local_run": FORMAT, "settings": dict(settings)}
        self._begun = False
        """Whether the file is this run's; before its first record nothing of an earlier one is touched."""
        self._file = open(self.path, "ab+")  # noqa: SIM115
        try:
            if there and not overwrite:
                end = self._read(dict(settings))
                if end:
                    self._file.truncate(end)
                self._begun = end > 0
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._file.truncate(0)
            self._append(self._header)

    def _read(self, settings: dict[str, Any]) -> int:
        """Takes in what is there; the bytes of it that are whole."""
        self._file.seek(0)
        end = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                if end == 0 and not raw.startswith(MARK[: len(raw)]):
                    raise ConfigError(f"{self.path} is no journal of a run; move it, or name another output")
                break
            try:
                data = json.loads(raw)
                if end == 0:
                    self._compare(data, settings)
                else:
                    self._note(int(data["line"]), str(data["digest"]), end, data["record"])
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                if isinstance(error, ConfigError):
                    raise
                if end == 0 or self._file.read(1):  # not at the end: no kill did that
                    raise ConfigError(f"{self.path} is damaged at byte {end}; use --overwrite to begin anew") from error
                break
            end += len(raw)
        return end

    def _compare(self, data: Any, settings: dict[str, Any]) -> None:
        before = data["settings"] if data["racer_local_run"] == FORMAT else {}
        now = json.loads(json.dumps(settings))
        if before != now:
            other = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
            raise ConfigError(
                f"{self.path} was begun with another {', '.join(other)}; go on with the same, or use --overwrite"
            )

    def add(self, line: int, digest: str, record: Mapping[str, Any]) -> None:
        """On the disk when this returns."""
        self._begin()
        self._note(line, digest, self._append({"line": line, "digest": digest, "record": record}), record)

    def _note(self, line: int, digest: str, place: int, record: Mapping[str, Any]) -> None:
        self.answered[line] = digest, place
        (self.failed.add if record.get("error") else self.failed.discard)(line)

    def _append(self, data: Mapping[str, Any]) -> int:
        place = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(encoded(data))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._full(self.path, error) from error
        return place

    def finish(self, numbers: Iterable[int], others: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the output: the records of these lines in this order, those of `others` by number among them.

        Where some of them are errors the journal stays: mended lines can then be answered by going on.
        """
        self._begin()
        failed = bool(others or self.failed)
        try:
            with NamedTemporaryFile(
                dir=self.output.parent, prefix=self.output.name, suffix=".tmp", delete=False
            ) as out:
                try:
                    for number in numbers:
                        out.write(encoded(others[number] if number in others else self._record(number)))
                    out.flush()
                    os.fsync(out.fileno())
                    os.chmod(out.name, stat.S_IMODE(self.path.stat().st_mode))
                    os.replace(out.name, self.output)
                finally:
                    Path(out.name).unlink(missing_ok=True)
        except OSError as error:
            raise self._full(self.output, error) from error
        if not failed:
            self.path.unlink()

    def _full(self, path: Path, error: OSError) -> OSError:
        what = f"{path} can't be written ({error.strerror}); what was answered is kept: make room"
        return OSError(f"{what}, then the same command with --resume goes on")

    def _record(self, number: int) -> Any:
        self._file.seek(self.answered[number][1])
        return json.loads(self._file.readline())["record"]

    def close(self) -> None:
        with suppress(OSError):  # of what a full disk did not take, and was told when it did not
            self._file.close()
        if not self._begun and self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock.is_locked:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def encoded(record: Mapping[str, Any]) -> bytes:
    """A line. Half a surrogate pair, which JSON can name and UTF-8 can't hold, stays an escape."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
