"""One URL to one checked file: going on where an earlier run stopped, and watching the disk."""

from __future__ import annotations

import hashlib
import http.client
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from racer_local.errors import DownloadError
from racer_local.models.entry import SourceError, readable_size
from racer_local.models.web import CHUNK, CutError, RangeError, read, request

ATTEMPTS = 4
"""Times that a download whose connection breaks goes on, as long as each try brings it further."""
RETRY_PAUSE_S = 1.0
SPARE_BYTES = 16 << 20
"""Bytes that a download leaves free on the disk."""

Report = Callable[[int, int | None], None]
"""Takes the bytes that are here and the bytes of the whole file, None if nobody knows them."""


@dataclass(frozen=True)
class Remote:
    """A file on a server and what it must turn out to be."""

    url: str
    size: int | None
    sha256: str
    authorization: str | None


def download(remote: Remote, part: Path, report: Report) -> None:
    """Fetches into `part`, going on where an earlier run stopped, and checks it.

    Raises SourceError; after a wrong checksum nothing is left of the file.
    """
    resumed = bytes_in(part) > 0
    _transfer_patiently(remote, part, report)
    try:
        check(part, remote.sha256)
    except SourceError:
        if not resumed:
            raise
        # A crash may have damaged what the earlier run left; now that it is gone, this happens only once.
        download(remote, part, report)


def check(part: Path, sha256: str) -> None:
    """Throws the file away and raises SourceError if it has another checksum."""
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        discard(part)
        raise SourceError("what arrived has the wrong checksum and was thrown away")


def discard(part: Path) -> None:
    """Deletes the file and what was kept for going on with it."""
    _etag_file(part).unlink(missing_ok=True)
    part.unlink(missing_ok=True)


def bytes_in(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def make_room(folder: Path, size: int) -> None:
    """Raises DownloadError if `size` more bytes don't fit into the folder."""
    free = shutil.disk_usage(folder).free
    if size > 0 and free < size + SPARE_BYTES:
        raise DownloadError(
            f"{readable_size(size)} more are needed in {folder}, but {readable_size(free)} are free; "
            "make room there, or set RACER_LOCAL_HOME to a folder on a larger disk"
        )


def _transfer_patiently(remote: Remote, part: Path, report: Report) -> None:
    """Goes on after a broken connection, as long as that brings new bytes."""
    for attempt in range(1, ATTEMPTS + 1):
        before = bytes_in(part)
        try:
            _transfer(remote, part, report)
            return
        except CutError:
            if attempt == ATTEMPTS or bytes_in(part) <= before or not _resumable(part, remote.size):
                raise
            time.sleep(RETRY_PAUSE_S)


def _transfer(remote: Remote, part: Path, report: Report) -> None:
    have = _resumable(part, remote.size)
    if have and have == remote.size:
        return
    response, offset = _open_at(remote, part, have)
    with response:
        total = _promised(response, offset, remote.size)
        if offset == 0:
            _start_over(part, response.headers.get("ETag"))
        make_room(part.parent, (total or 0) - offset)
        with part.open("ab") as out:
            _copy(response, out, offset, total, report)


def _open_at(remote: Remote, part: Path, have: int) -> tuple[http.client.HTTPResponse, int]:
    """The answer and the offset that it starts at: `have` if the server goes on there, else 0."""
    if have:
        headers = {"Range": f"bytes={have}-", "If-Range": _etag_file(part).read_text("ascii")}
        with suppress(RangeError):
            response = request(remote.url, headers, remote.authorization)
            if response.status != 206:
                return response, 0
            if _goes_on(response.headers.get("Content-Range", ""), have, remote.size):
                return response, have
            response.close()
    return request(remote.url, {}, remote.authorization), 0


def _goes_on(content_range: str, have: int, size: int | None) -> bool:
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", content_range.strip())
    return bool(match and int(match[1]) == have and (size is None or match[3] in ("*", str(size))))


def _promised(response: http.client.HTTPResponse, offset: int, size: int | None) -> int | None:
    """Bytes of the whole file. Raises SourceError if the server has a file of another size."""
    length = response.headers.get("Content-Length", "")
    if not length.isdigit():
        return size
    total = offset + int(length)
    if size not in (None, total):
        raise SourceError(f"offers {total} bytes, expected {size}")
    return total


def _copy(response: http.client.HTTPResponse, out: BinaryIO, done: int, total: int | None, report: Report) -> None:
    report(done, total)
    while chunk := read(response):
        done += len(chunk)
        if total is not None and done > total:
            raise SourceError(f"sends more than the {total} bytes it should")
        out.write(chunk)
        report(done, total)
    if total is not None and done < total:
        raise CutError(f"the connection ended after {done} of {total} bytes")


def _resumable(part: Path, size: int | None) -> int:
    """Bytes of `part` that can be kept. Without an ETag, the server may have another file by now."""
    have = bytes_in(part)
    if size is not None and have >= size:
        return have if have == size else 0
    return have if _etag_file(part).is_file() else 0


def _start_over(part: Path, etag: str | None) -> None:
    """Empties `part`; the ETag is written last, so that it never stands beside older bytes."""
    discard(part)
    part.touch()
    if etag and etag.startswith('"') and etag.isascii():
        _etag_file(part).write_text(etag, "ascii")


def _etag_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.etag")
