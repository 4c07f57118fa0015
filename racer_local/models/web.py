"""One HTTP request: time-outs, redirects, credentials, and what to say when it fails."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from racer_local import __version__
from racer_local.models.entry import SourceError

CONNECT_TIMEOUT_S = 10.0
"""Seconds until a silent host counts as unreachable."""
READ_TIMEOUT_S = 30.0
"""Seconds without a byte until a connection counts as lost."""
CHUNK = 1 << 18


class CutError(SourceError):
    """The connection broke in the middle of the body; what arrived is kept."""


class RangeError(SourceError):
    """HTTP 416: the server's file is shorter than what is here."""


def request(url: str, headers: Mapping[str, str], authorization: str | None) -> http.client.HTTPResponse:
    """The answer to a GET. Raises SourceError for no answer and for every status but 2xx."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise SourceError(f"{url} is no http address; correct HF_ENDPOINT or the package index")
    # A compressed body would have other bytes than the file, and no ranges.
    get = urllib.request.Request(
        url, headers={"User-Agent": f"racer-local/{__version__}", "Accept-Encoding": "identity", **headers}
    )
    if authorization:
        get.add_unredirected_header("Authorization", authorization)
    opener = urllib.request.build_opener(_Handler, _RedirectHandler)
    try:
        response: http.client.HTTPResponse = opener.open(get, timeout=CONNECT_TIMEOUT_S)
    except (OSError, http.client.HTTPException, ValueError) as error:
        kind = RangeError if getattr(error, "code", None) == 416 else SourceError
        raise kind(_reason(error)) from error
    return response


def read(response: http.client.HTTPResponse) -> bytes:
    """What is there, at most CHUNK bytes: waiting for more would lose it when the connection breaks."""
    try:
        return response.read1(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise CutError(f"the connection broke: {_reason(error)}") from error


def without_credentials(url: str) -> tuple[str, str | None]:
    """The URL without user:password, and those as a header: urllib does not know them in a URL."""
    pieces = urllib.parse.urlsplit(url)
    user, at, host = pieces.netloc.rpartition("@")
    if not at:
        return url, None
    token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    return pieces._replace(netloc=host).geturl(), f"Basic {token}"


def _reason(error: BaseException) -> str:
    """A few words on what went wrong."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"HTTP {error.code}" + (" (set HF_TOKEN if it needs one)" if error.code in (401, 403) else "")
    if isinstance(error, urllib.error.URLError):
        return _reason(error.reason) if isinstance(error.reason, OSError) else str(error.reason)
    if isinstance(error, socket.gaierror):
        return "host name not found"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message} (SSL_CERT_FILE can name the certificates to trust)"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split()).lower()


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Takes a token along within a host only: the Hub redirects to a store that has no business with it."""

    def redirect_request(self, req: urllib.request.Request, *args: Any, **kwargs: Any) -> urllib.request.Request | None:
        new = super().redirect_request(req, *args, **kwargs)
        token = req.unredirected_hdrs.get("Authorization")
        if new and token and (new.type, new.host) == (req.type, req.host):
            new.add_unredirected_header("Authorization", token)
        return new


class _HttpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self._create_connection = _connect
        super().connect()
        self.sock.settimeout(READ_TIMEOUT_S)


class _HttpsConnection(_HttpConnection, http.client.HTTPSConnection):
    """`connect` goes through both: the time-out for reading starts after the handshake."""


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_HttpConnection, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_HttpsConnection, req, context=ssl.create_default_context())


def _connect(address: tuple[str, int], timeout: float, _source: object = None) -> socket.socket:
    """One address a family, all within `timeout`.

    The standard library waits that long for each of a host's addresses; a Hub behind a firewall has eight.
    """
    found = reversed(socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
    first = list({family: (family, target) for family, _, _, _, target in found}.values())
    for number, (family, target) in enumerate(first):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(timeout / len(first))
        try:
            sock.connect(target)
        except OSError:
            sock.close()
            if number == len(first) - 1:
                raise
        else:
            sock.settimeout(timeout)
            return sock
    raise OSError(f"{address[0]} has no address")
