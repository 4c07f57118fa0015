"""Who may come in, and how much they may bring: keys, hosts, origins and sizes, before anything is parsed."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from hmac import compare_digest
from typing import Any
from urllib.parse import urlsplit

from racer_local.config import LOOPBACK, ServerConfig
from racer_local.server.metrics import Metrics
from racer_local.wire.errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/", "/health", "/favicon.ico")
"""Paths that need no key; so do the page's files."""
PAGE = "/page/"
SAFETY = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
]


class Guard:
    """An ASGI application before another one. It leaves the key's owner in scope["state"]["owner"]."""

    def __init__(self, app: App, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics
        self._keys = [sha256(key.encode()).digest() for key in config.api_keys]
        self._open_to_all = not self._keys
        self._hosts = {*LOOPBACK, config.host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun = 0, False

        async def sending(message: MutableMapping[str, Any]) -> None:
            nonlocal status, begun
            if body.is_too_large:  # whatever the application made of that
                if not begun:
                    status, begun = 413, True
                    await _refuse(_too_large(self._config.body_bytes), send)
                return
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                message["headers"] = [*message.get("headers", []), *SAFETY]
            await send(message)

        body = _Body(receive, self._config.body_bytes)
        try:
            self._check(scope)
            await self._app(scope, body, sending)
        except ApiError as error:
            if not begun:
                status = error.status
                await _refuse(error, send)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()

    def _check(self, scope: Scope) -> None:
        """Raises ApiError."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        scope.setdefault("state", {})["owner"] = ""
        path = scope["path"]
        if self._open_to_all:
            self._check_browser(headers)
        elif path not in OPEN and not path.startswith(PAGE) and scope["method"] != "OPTIONS":
            scope["state"]["owner"] = self._owner(headers.get("authorization", ""))
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.body_bytes:
            raise _too_large(self._config.body_bytes)

    def _owner(self, authorization: str) -> str:
        """Who has the key. Every key is compared, each in constant time."""
        kind, _, key = authorization.partition(" ")
        given, owner = sha256(key.strip().encode()).digest(), ""
        for known in self._keys:
            if compare_digest(given, known):
                owner = known.hex()
        if kind.lower() != "bearer" or not owner:
            what = "this key is not known" if authorization else "a key is needed"
            raise ApiError(401, f"{what}; send it as: Authorization: Bearer KEY", code="invalid_api_key")
        return owner

    def _check_browser(self, headers: dict[str, str]) -> None:
        """Without keys, only pages of this server and programs may use it: a web page that a user of this machine looks
        at must not, neither by sending requests here nor by giving its own name this address."""
        host = headers.get("host", "")
        if _host_of(f"//{host}")[0] not in self._hosts:
            raise ApiError(403, f"this server is not {host!r}; reach it by its address, or give it an --api-key")
        origin = headers.get("origin")
        if origin and _host_of(origin)[1] != host and origin not in self._config.cors:
            raise ApiError(403, f"pages of {origin} may not use this server; allow it with --cors {origin}")


def _host_of(url: str) -> tuple[str | None, str]:
    """Its host, and that with the port; nothing where it is no address."""
    try:
        parts = urlsplit(url)
        return parts.hostname, parts.netloc
    except ValueError:
        return None, ""


class _Body:
    """A request's body, up to a size."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._seen = receive, most, 0

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self.is_too_large:
            raise _too_large(self._most)
        return message

    @property
    def is_too_large(self) -> bool:
        return self._seen > self._most


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the request is larger than {most} bytes; send less, or allow more (--max-body)")


async def _refuse(error: ApiError, send: Send) -> None:
    body = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": [*raw, *SAFETY]})
    await send({"type": "http.response.body", "body": body})
