"""One URL to one checked file: one HTTP request, going on where an earlier one stopped, and the disk."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from racer_local import __version__
from racer_local.errors import DownloadError
from racer_local.models.registry import readable_size

TIMEOUT_S = 10.0
"""Seconds of silence until a connection counts as lost."""
ATTEMPTS = 4
"""Times that a download whose connection breaks goes on, as long as each try brings it further."""
RETRY_PAUSE_S = 1.0
SPARE_BYTES = 16 << 20
"""Bytes that a download leaves free on the disk."""
CHUNK = 1 << 18

Report = Callable[[int, int | None], None]
"""Takes the bytes that are here and the bytes of the whole file, None if nobody knows them."""


class SourceError(DownloadError):
    """Why one source can't deliver; the next one is tried."""


class SpoiledError(SourceError):
    """The connection broke in the middle of the body, or what arrived has the wrong checksum."""


@dataclass(frozen=True)
class Remote:
    """A file on a server and what it must turn out to be."""

    url: str
    size: int | None
    sha256: str | None
    """None: nobody knows; whoever asked must look at what came."""
    authorization: str | None


def download(remote: Remote, part: Path, report: Report) -> None:
    """Fetches into `part`, going on where an earlier run stopped, and checks it.

    Goes on after a broken connection as long as that brings bytes, and starts over, once, if what was resumed
    turns out to be another file's. Raises SourceError.
    """
    for attempt in range(1, ATTEMPTS + 1):
        have = bytes_in(part)
        try:
            _transfer(remote, part, have, report)
            return check(part, remote.sha256) if remote.sha256 else None
        except SpoiledError:
            grew, emptied = bytes_in(part) > have, have and not bytes_in(part)
            if attempt == ATTEMPTS or not (grew or emptied):
                raise
            time.sleep(RETRY_PAUSE_S)


def check(path: Path, sha256: str) -> None:
    """Throws the file away and raises SpoiledError if it has another checksum."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        path.unlink()
        raise SpoiledError("wrong checksum: the file there has changed or the transfer is damaged; thrown away")


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


def request(url: str, authorization: str | None, headers: dict[str, str]) -> http.client.HTTPResponse:
    """The answer to a GET: 2xx, or 416 to a Range. Raises SourceError for all else."""
    token = {"Authorization": authorization} if authorization else {}
    try:
        get = urllib.request.Request(url, headers={"User-Agent": f"racer-local/{__version__}", **headers, **token})
        if get.type not in ("http", "https"):
            raise ValueError
        return cast("http.client.HTTPResponse", urllib.request.build_opener(_Handler).open(get, timeout=TIMEOUT_S))
    except (ValueError, http.client.InvalidURL):
        # Their text could show a password in the address.
        raise SourceError("no valid http address or token; correct HF_ENDPOINT, HF_TOKEN or the index") from None
    except (OSError, http.client.HTTPException) as error:
        raise SourceError(_reason(error)) from error


def read(response: http.client.HTTPResponse) -> bytes:
    """What is there, at most CHUNK bytes: waiting for more would lose it when the connection breaks."""
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise SpoiledError(f"the connection broke: {_reason(error)}") from error


class _Handler(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: urllib.request.Request, *args: Any, **kwargs: Any) -> urllib.request.Request | None:
        """Takes a token along within a host only: the Hub redirects to a store that has no business with it."""
        new = super().redirect_request(req, *args, **kwargs)
        if new and urlsplit(new.full_url)[:2] != urlsplit(req.full_url)[:2]:
            new.remove_header("Authorization")
        return new

    def http_error_416(self, req: object, response: Any, *args: object) -> Any:
        return response


def _transfer(remote: Remote, part: Path, have: int, report: Report) -> None:
    """Gets what is missing. Whether it fits to what was there is for the checksum to tell."""
    if remote.size is not None and have >= remote.size:
        return
    with request(remote.url, remote.authorization, {"Range": f"bytes={have}-"} if have else {}) as response:
        if have and response.status == 416:
            return
        done = have if response.status == 206 else 0
        total = remote.size if response.length is None else done + response.length
        if remote.size not in (None, total):
            raise SourceError(f"the file there has changed: {total} bytes instead of {remote.size}")
        make_room(part.parent, (total or 0) - done)
        with part.open("ab" if done else "wb") as out:
            report(done, total)
            while chunk := read(response):
                out.write(chunk)
                done += len(chunk)
                report(done, total)
    if total is not None and done < total:
        raise SpoiledError(f"the connection ended after {done} of {total} bytes")


def _reason(error: Exception) -> str:
    """A few words on what went wrong."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"HTTP {error.code}" + (" (set HF_TOKEN if it needs one)" if error.code in (401, 403) else "")
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return " ".join(str(getattr(cause, "strerror", None) or cause).split()).lower()
