"""The routes: parse, put work before the worker, print."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from racer_local import __version__
from racer_local.config import SamplingConfig, ServerConfig
from racer_local.errors import RacerError
from racer_local.server.garage import Garage
from racer_local.server.guard import PAGE, Guard
from racer_local.server.indexes import Indexes
from racer_local.server.metrics import Metrics
from racer_local.server.work import Cancelled, Job, Worker
from racer_local.wire import asking, requests
from racer_local.wire.answers import Answers, ChatAnswers, TextAnswers
from racer_local.wire.errors import ApiError

T = TypeVar("T")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript"}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": why, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, why in {
        400: "what is asked for can't be done",
        401: "a key is needed",
        403: "not allowed",
        404: "there is no such model, corpus or path",
        413: "too large",
        422: "the request is not of the form that is described here",
        429: "too many requests wait",
        500: "the server failed",
        503: "the model is loading, or the server is stopping",
    }.items()
}
GONE = 499
"""The status for a client that has gone away; nobody sees it but the metrics."""
log = logging.getLogger("racer_local.server")


@dataclass
class Server:
    """What the routes share."""

    config: ServerConfig
    sampling: SamplingConfig
    garage: Garage
    indexes: Indexes
    worker: Worker
    metrics: Metrics
    state: str = "loading"
    """Then "ok", at the end "stopping"."""

    def must_be_ready(self) -> None:
        if self.state != "ok":
            raise ApiError(503, f"the server is {self.state}; try again soon", code=self.state, retry_s=1)

    async def do(self, request: Request, work: Callable[[Job], T]) -> T:
        """What `work` returns, done by the thread that owns the models; it looks whether the job is cancelled."""
        job = Job(request.state.owner, lambda job: job.tell(work(job)))
        async with self._attended(request, job):
            async for words in job.words():
                result: T = words[0]
                return result
        raise Cancelled

    @asynccontextmanager
    async def _attended(self, request: Request, job: Job) -> AsyncIterator[None]:
        """Puts a job before the worker, and takes it back when the client goes away."""
        self.must_be_ready()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.metrics.cancelled.inc()
            self.worker.cancel(job)

        self.worker.submit(job)
        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            if not job.ended:
                self.worker.cancel(job)

    async def answer(self, request: Request, asked: asking.Asked, kind: type[Answers]) -> Response:
        """The answer to a completion of either kind, whole or as a stream."""
        asking.check_limits(asked.request, asked.most, self.config)
        if asked.most is None:
            asked.most = self.config.most_tokens
        name = self.garage.name_of(asked.request.model)
        answers, started = kind(asked, name), time.monotonic()

        def work(job: Job) -> None:
            count = partial(self.metrics.count, name)
            asking.answer(job, self.garage.session(name), asked, self.sampling, self.indexes.paths, count)

        async def words(job: Job) -> AsyncIterator[list[Any]]:
            first = True
            async for said in job.words():
                if first:
                    self.metrics.first_token.labels(name).observe(time.monotonic() - started)
                first = False
                yield said

        job = Job(request.state.owner, work)
        if asked.request.stream:
            return EventStream(self._attended(request, job), words(job), answers)
        async with self._attended(request, job):
            async for said in words(job):
                answers.take(said)
        return Response(status_code=GONE) if job.cancelled else JSONResponse(answers.whole())


class EventStream(Response):
    """Server-sent events. The status waits for the first word, so that what is wrong with a request has its own."""

    def __init__(self, attended: Any, words: AsyncIterator[list[Any]], answers: Answers) -> None:
        super().__init__()
        self._attended, self._words, self._answers = attended, words, answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False

        async def tell(data: str, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                headers.append((b"x-accel-buffering", b"no"))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": data.encode(), "more_body": more})

        try:
            async with self._attended:
                async for said in self._words:
                    await tell("".join(map(_event, self._answers.chunks(said))))
                await tell("".join(map(_event, self._answers.tail())) + "data: [DONE]\n\n", more=False)
        except Exception as error:
            failure = ApiError.of(error)
            if not begun:
                raise failure from error
            await tell(_event(failure.body), more=False)


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def make_app(server: Server) -> Any:
    """The application, guarded."""
    app = FastAPI(
        title="racer_local",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        redirect_slashes=False,
    )
    _add_errors(app)
    _add_completions(app, server)
    _add_facts(app, server)
    _add_corpora(app, server)
    _add_page(app)
    if server.config.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.config.cors),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return Guard(app, server.config, server.metrics)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> Response:
        return _failed(ApiError.of_form(error.errors(), within=1))

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> Response:
        told = {404: "there is no such address", 405: "this address has no such method"}
        failure = ApiError(error.status_code, told.get(error.status_code, str(error.detail)))
        failure.headers.update(error.headers or {})
        return _failed(failure)

    @app.exception_handler(Cancelled)
    async def gone(_request: Request, _error: Cancelled) -> Response:
        return Response(status_code=GONE)

    @app.exception_handler(Exception)
    @app.exception_handler(RacerError)
    @app.exception_handler(ApiError)
    async def failed(_request: Request, error: Exception) -> Response:
        return _failed(ApiError.of(error))


def _failed(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


def _add_completions(app: FastAPI, server: Server) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: requests.ChatRequest, request: Request) -> Response:
        return await server.answer(request, asking.chat(body, request.state.owner), ChatAnswers)

    @app.post("/v1/completions")
    async def complete(body: requests.CompletionRequest, request: Request) -> Response:
        return await server.answer(request, asking.completion(body, request.state.owner), TextAnswers)

    @app.post("/v1/embeddings")
    async def embed(body: requests.EmbeddingRequest, request: Request) -> dict[str, Any]:
        name = server.garage.name_of(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input

        def embed_all(job: Job) -> list[Any]:
            embedder = server.garage.embedder(name)
            return [embedder.embed(text) for text in texts if job.goes_on()]

        embedded = await server.do(request, embed_all)
        tokens = sum(count for _, count in embedded)
        as_text = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": i, "embedding": _base64(vector) if as_text else vector.tolist()}
            for i, (vector, _) in enumerate(embedded)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": name, "usage": usage}

    @app.post("/tokenize")
    async def tokenize(body: requests.TokenizeRequest, request: Request) -> dict[str, Any]:
        def tokens(_job: Job) -> list[int]:
            model = server.garage.session(server.garage.name_of(body.model)).model
            return model.tokenize(body.content, add_special=body.add_special, parse_special=body.parse_special)

        return {"tokens": await server.do(request, tokens)}

    @app.post("/detokenize")
    async def detokenize(body: requests.DetokenizeRequest, request: Request) -> dict[str, Any]:
        def text(_job: Job) -> str:
            model = server.garage.session(server.garage.name_of(body.model)).model
            return b"".join(model.piece(token, special=True) for token in body.tokens).decode("utf-8", "replace")

        return {"content": await server.do(request, text)}


def _base64(vector: Any) -> str:
    return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def _add_facts(app: FastAPI, server: Server) -> None:
    def fact(name: str) -> dict[str, Any]:
        parked = server.garage.models[name]
        head = {"id": name, "object": "model", "created": parked.created, "owned_by": "racer_local"}
        return {**head, "n_ctx": parked.n_ctx, "loaded": parked.loaded}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [fact(name) for name in server.garage.models]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return fact(server.garage.name_of(name))

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": server.state}, 200 if server.state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics.text(), media_type="text/plain; version=0.0.4")


def _add_corpora(app: FastAPI, server: Server) -> None:
    @app.get("/v1/corpora")
    async def listed() -> dict[str, Any]:
        return {"object": "list", "data": server.indexes.listed()}

    @app.post("/v1/corpora", status_code=201)
    async def make(body: requests.CorpusRequest, request: Request) -> dict[str, Any]:
        path = server.indexes.allowed(body.path)
        name = server.garage.name_of(body.model)

        def made(job: Job) -> dict[str, Any]:
            model = server.garage.session(name).model
            return server.indexes.make(body.id, path, model, chat=body.chat, go_on=job.goes_on)

        return await server.do(request, made)

    @app.delete("/v1/corpora/{name}")
    async def drop(name: str) -> dict[str, Any]:
        server.indexes.drop(name)
        return {"id": name, "object": "corpus", "deleted": True}


def _add_page(app: FastAPI) -> None:
    folder = Path(__file__).parent / "page"
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def answer(name: str) -> Response:
        if name not in files:
            raise ApiError(404, "there is no such address")
        kind = KINDS.get(Path(name).suffix, "text/plain")
        return Response(files[name], media_type=kind, headers={"Cache-Control": "no-cache"})

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answer("index.html")

    @app.get(PAGE + "{name:path}", include_in_schema=False)
    async def page(name: str) -> Response:
        return answer(name)

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(status_code=204)
