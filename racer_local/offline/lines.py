"""From a line of a file to a request: OpenAI's batch shape, {"messages": [...]} or {"prompt": "..."}, with options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from racer_local.wire import asking
from racer_local.wire.answers import Answers, ChatAnswers, TextAnswers
from racer_local.wire.asking import Asked
from racer_local.wire.errors import ApiError
from racer_local.wire.requests import ChatRequest, CompletionRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHAPES = '{"prompt": "..."}, {"messages": [...]} or {"custom_id": "...", "url": "/v1/chat/completions", "body": {...}}'


@dataclass(frozen=True)
class Defaults:
    """What a line may leave open."""

    max_tokens: int
    system: str | None = None
    """A system message for lines that have none."""
    raw: bool = False
    """Whether prompts are texts to go on with, not a user's messages."""


@dataclass(frozen=True)
class Line:
    """One request of the file, or why it is none."""

    number: int
    """Of the file's lines, from 1 on."""
    digest: str
    """Equal where the line is the same."""
    id: str | int
    """Its own, else its number."""
    batch: bool = False
    """Whether it has OpenAI's batch shape, and so its answer too."""
    named: bool = False
    """Whether the id is its own."""
    asked: Asked | None = None
    kind: type[Answers] = ChatAnswers
    error: ApiError | None = None


def read_lines(raws: Iterable[bytes], defaults: Defaults) -> Iterator[Line]:
    """The requests of a file's lines; blank ones are none. An id that an earlier line has is an error."""
    seen: dict[str | int, int] = {}
    for number, raw in enumerate(raws, 1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw.strip():
            continue
        line = read_line(number, raw, defaults)
        if line.named and line.id in seen:
            error = ApiError(422, f"the id {line.id!r} is that of line {seen[line.id]} too; give each its own")
            line = Line(number, line.digest, line.id, line.batch, error=error)
        if line.named:
            seen.setdefault(line.id, number)
        yield line


def read_line(number: int, raw: bytes, defaults: Defaults) -> Line:
    """What a line asks. Nothing is raised: a line that asks nothing has an `error`."""
    digest, name, batch, named = hashlib.sha256(raw.strip()).hexdigest()[:16], number, False, False
    try:
        data = _object(raw)
        batch = "body" in data or "custom_id" in data
        name, named = _id(data, number), "custom_id" in data or "id" in data
        asked, kind = _batch(data, defaults) if batch else _simple(data, defaults)
        return Line(number, digest, name, batch, named, asked, kind)
    except ValidationError as error:
        return Line(number, digest, name, batch, named, error=ApiError.of_form(error.errors()))
    except ApiError as error:
        return Line(number, digest, name, batch, named, error=error)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(422, f"the line is no UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(422, f"the line is no JSON ({error})") from error
    if not isinstance(data, dict):
        raise ApiError(422, f"the line must be an object: {SHAPES}")
    return data


def _id(data: Mapping[str, Any], number: int) -> Any:
    found = data.get("custom_id", data.get("id", number))
    if isinstance(found, bool) or not isinstance(found, (str, int)):
        raise ApiError(422, f"an id must be a text or a number, not {json.dumps(found)[:40]}")
    return found


def _batch(data: dict[str, Any], defaults: Defaults) -> tuple[Asked, type[Answers]]:
    if unknown := data.keys() - {"custom_id", "method", "url", "body"}:
        raise ApiError(422, f"{min(unknown)}: no such field beside a body; known: custom_id, method, url")
    body = data.get("body")
    if not isinstance(body, dict):
        raise ApiError(422, f"body: it must be an object: {SHAPES}")
    if data.get("method", "POST") != "POST":
        raise ApiError(422, "method: only POST can be asked")
    url = data.get("url", CHAT if "messages" in body else TEXT)
    if url not in (CHAT, TEXT):
        raise ApiError(422, f"url: {json.dumps(url)[:80]} can't be asked here; known: {CHAT}, {TEXT}")
    return _chat(body, defaults) if url == CHAT else _text(body, defaults)


def _simple(data: dict[str, Any], defaults: Defaults) -> tuple[Asked, type[Answers]]:
    body = {name: value for name, value in data.items() if name not in ("id", "raw", "system")}
    raw, system = data.get("raw", defaults.raw), data.get("system", defaults.system)
    if not isinstance(raw, bool) or not isinstance(system, (str, type(None))):
        raise ApiError(422, "raw must be true or false, and system a text")
    if ("prompt" in body) == ("messages" in body):
        raise ApiError(422, f"the line must be one of {SHAPES}")
    if "prompt" not in body:
        return _chat(body, Defaults(defaults.max_tokens, system))
    if raw:
        if "system" in data:
            raise ApiError(422, "system: a raw prompt has none; leave out one of the two")
        return _text(body, defaults)
    prompt = body.pop("prompt")
    if not isinstance(prompt, str):
        raise ApiError(422, "prompt: it must be a text; token ids need raw: true")
    return _chat({**body, "messages": [{"role": "user", "content": prompt}]}, Defaults(defaults.max_tokens, system))


def _chat(body: dict[str, Any], defaults: Defaults) -> tuple[Asked, type[Answers]]:
    request = ChatRequest.model_validate(_complete(body, defaults))
    if defaults.system and not any(message.role in ("system", "developer") for message in request.messages):
        system = {"role": "system", "content": defaults.system}
        request = ChatRequest.model_validate({**_complete(body, defaults), "messages": [system, *body["messages"]]})
    return asking.chat(request), ChatAnswers


def _text(body: dict[str, Any], defaults: Defaults) -> tuple[Asked, type[Answers]]:
    return asking.completion(CompletionRequest.model_validate(_complete(body, defaults))), TextAnswers


def _complete(body: dict[str, Any], defaults: Defaults) -> dict[str, Any]:
    """With the number of tokens if it is left open. Whether it is to be streamed says nothing here."""
    told = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    given = any(told.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))
    return told if given else {**told, "max_tokens": defaults.max_tokens}
