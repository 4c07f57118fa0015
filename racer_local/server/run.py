"""The server as a process: it listens while the first model loads, and ends its answers before it goes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from racer_local.config import ContextConfig, DraftConfig, ModelConfig, SamplingConfig, ServerConfig
from racer_local.errors import ConfigError, ModelError
from racer_local.llama.vocabulary import check_file
from racer_local.server.app import Server, make_app
from racer_local.server.garage import Garage
from racer_local.server.indexes import Indexes
from racer_local.server.metrics import Metrics
from racer_local.server.work import Job, Worker

GOODBYE_S = 2
"""That connections have to take the end of their answers."""

log = logging.getLogger("racer_local.server")


def serve(
    paths: dict[str, Path],
    config: ServerConfig,
    model: ModelConfig,
    context: Callable[[Path], ContextConfig],
    draft: DraftConfig,
    sampling: SamplingConfig,
) -> int:
    """Serve until told to stop (SIGTERM, SIGINT); the exit code.

    Raises ConfigError where the address can't be listened to, ModelError where a file is no model or the first one
    can't be loaded.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for path in paths.values():
        check_file(path)
    garage = Garage(paths, model, context, draft, config.ram_bytes, log.info)
    indexes = Indexes(draft.corpora, config.folders)
    listener = _listen(config)
    worker = Worker(config.queue)
    loaded = lambda: sum(parked.loaded for parked in garage.models.values())  # noqa: E731
    server = Server(config, sampling, garage, indexes, worker, Metrics(lambda: len(worker), loaded))
    running = _Running(server, listener)
    running.run(sockets=[listener])
    if not worker.stop(0):  # its thread is inside llama.cpp: to free a model now, here or at exit, would end in a crash
        log.warning("the running work could not be stopped")
        os._exit(0)
    garage.close()
    if running.failure:
        raise ModelError(running.failure)
    return 0


def _listen(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        where, why = f"{config.host}:{config.port}", error.strerror or error
        raise ConfigError(f"{where} can't be listened to ({why}); take another --port or --host") from error
    return listener


class _Running(uvicorn.Server):
    """uvicorn, which stops when the running answer has ended, its time is over, or it is told again."""

    def __init__(self, server: Server, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(server),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=GOODBYE_S,
                ws="none",
            )
        )
        self._server, self._listener = server, listener
        self._told = self._hurries = False
        self.failure = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        where = f"http://{shown}:{port} (the page), http://{shown}:{port}/v1 (OpenAI's HTTP)"
        log.info("listening on %s; loading %s", where, next(iter(self._server.garage.models)))
        self._start(self._load())

    async def _load(self) -> None:
        """The first model; without it there is nothing to serve."""
        garage = self._server.garage
        name = next(iter(garage.models))
        job = Job("", lambda job: garage.load(name))
        self._server.worker.submit(job)
        try:
            async for _ in job.words():
                pass
        except Exception as error:
            self.failure = str(error)
            self.should_exit = True
            return
        if self._server.state == "loading":
            self._server.state = "ok"
            log.info("%s is loaded", name)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._told:
            self._server.worker.interrupt()
            self.should_exit = self._hurries = True
            return
        self._told = True
        self._loop.call_soon_threadsafe(lambda: self._start(self._stop()))

    async def _stop(self) -> None:
        """No new work; the running one has its time."""
        server = self._server
        grace = server.config.grace if server.state == "ok" else 0.0  # there is no answer before a model is loaded
        server.state = "stopping"
        if server.worker.running and grace:
            log.info("stopping; the running answer has %g seconds, unless told again", grace)
        server.worker.drain()
        until = asyncio.get_running_loop().time() + grace
        while server.worker.running and asyncio.get_running_loop().time() < until and not self._hurries:
            await asyncio.sleep(0.05)
        server.worker.interrupt()
        self.should_exit = True

    def _start(self, coroutine: object) -> None:
        task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
