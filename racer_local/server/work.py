"""The one thread that owns the models, the queue before it, and the way of its words back to the event loop.

Nothing here knows what the work is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

from racer_local.wire.errors import ApiError

FLUSH_S = 0.05
"""Words are sent together that come within this time: nobody sees it, and waking the event loop takes its time
from the threads that compute, which wait for each other after every operation."""

log = logging.getLogger("racer_local.server")


class Queue:
    """Jobs in turn: one of each key that has any, and a key's own in their order.

    >>> queue = Queue(most=9)
    >>> for key, job in [("a", 1), ("a", 2), ("a", 3), ("b", 4)]: queue.put(key, job)
    >>> [queue.take() for _ in range(4)]
    [1, 4, 2, 3]
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[str, deque[Any]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, key: str, job: Any) -> Any:
        """The job for which there is no room: none, the last one of the key that has most waiting, or this one."""
        displaced = None
        if len(self) >= self._most:
            greediest = max(self._waiting, key=lambda each: len(self._waiting[each]))
            if len(self._waiting[greediest]) <= len(self._waiting.get(key, ())) + 1:
                return job
            displaced = self._waiting[greediest].pop()
        self._waiting.setdefault(key, deque()).append(job)
        return displaced

    def take(self) -> Any:
        """The next job, or None. Its key comes last from now on."""
        if not self._waiting:
            return None
        key, jobs = self._waiting.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._waiting[key] = jobs
        return job

    def remove(self, key: str, job: Any) -> bool:
        """Whether it was there."""
        jobs = self._waiting.get(key)
        if not jobs or job not in jobs:
            return False
        jobs.remove(job)
        if not jobs:
            del self._waiting[key]
        return True

    def clear(self) -> list[Any]:
        jobs = [job for jobs in self._waiting.values() for job in jobs]
        self._waiting.clear()
        return jobs


class Cancelled(Exception):
    """Nobody waits for this work any more."""


class Job:
    """Work for the thread, and what it says while it is done. Made on the event loop."""

    def __init__(self, key: str, work: Callable[[Job], object]) -> None:
        """`work` runs on the thread; it gives its words to `tell`, and looks at `cancelled` as often as it can."""
        self.key, self.work = key, work
        self.cancelled = False
        self.ended = False
        """Whether its last word was heard."""
        self.failure: ApiError | None = None
        """Why it was cancelled, if not by who asked."""
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[tuple[list[Any], BaseException | None, bool]] = asyncio.Queue()
        self._unsaid: list[Any] = []
        self._said_at = 0.0

    def is_cancelled(self) -> bool:
        return self.cancelled

    def goes_on(self) -> bool:
        """True; raises Cancelled where it does not."""
        if self.cancelled:
            raise Cancelled
        return True

    def tell(self, word: Any, *, ends_step: bool = True, at_once: bool = False) -> None:
        """Say something, together with what was told since words were last said, if that was FLUSH_S ago or `at_once`.

        ends_step: False for words of which more come at the same moment.
        """
        self._unsaid.append(word)
        if at_once or (ends_step and monotonic() - self._said_at > FLUSH_S):
            self._say(None, False)

    def end(self, error: BaseException | None = None) -> None:
        """No more words."""
        self._say(error, True)

    def _say(self, error: BaseException | None, last: bool) -> None:
        words, self._unsaid, self._said_at = self._unsaid, [], monotonic()
        try:
            self._loop.call_soon_threadsafe(self._heard.put_nowait, (words, error, last))
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.cancelled = True

    async def words(self) -> AsyncIterator[list[Any]]:
        """What is said, as much together as there is; raises what the work raised."""
        while True:
            words, error, last = await self._heard.get()
            self.ended = last
            if words:
                yield words
            if error is not None:
                raise error
            if last:
                return


def _stopping() -> ApiError:
    return ApiError(503, "the server is stopping; try again when it is back", code="stopping", retry_s=5)


class Worker:
    """The thread. Jobs may be given and taken back from any other one."""

    def __init__(self, most_waiting: int) -> None:
        self._queue = Queue(most_waiting)
        self._changed = threading.Condition()
        self.running: Job | None = None
        self._over = False
        self._seconds = 1.0
        """That a job takes, on the average of the last ones."""
        self._thread = threading.Thread(target=self._work, name="racer-models", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._queue)

    def submit(self, job: Job) -> None:
        """Raises ApiError: 429 where too many wait, 503 when the server stops."""
        with self._changed:
            if self._over:
                raise _stopping()
            refused = self._queue.put(job.key, job)
            waiting = len(self._queue)
            self._changed.notify()
        if refused is not None:
            why, wait = f"{waiting} requests wait already; try again later", self._seconds * (waiting + 1)
            full = ApiError(429, why, code="queue_full", retry_s=wait)
            if refused is job:
                raise full
            refused.end(full)

    def cancel(self, job: Job) -> None:
        """Its words end at once if it waits, and within a step if it runs."""
        job.cancelled = True
        with self._changed:
            waited = self._queue.remove(job.key, job)
        if waited:
            job.end()

    def drain(self) -> None:
        """No more jobs; those that wait are told so, the running one goes on."""
        with self._changed:
            self._over = True
            waiting = self._queue.clear()
            self._changed.notify()
        for job in waiting:
            job.end(_stopping())

    def interrupt(self) -> None:
        """End the running job within a step; who asked is told why."""
        if (running := self.running) is not None:
            running.failure = running.failure or _stopping()
            running.cancelled = True

    def stop(self, grace_s: float) -> bool:
        """Wait so long for the running job, then interrupt it. Whether the thread has ended."""
        self.drain()
        self._thread.join(grace_s)
        self.interrupt()
        self._thread.join(5.0)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not len(self._queue) and not self._over:
                    self._changed.wait()
                job = self.running = self._queue.take()
            if job is None:
                return
            self._do(job)
            self.running = None

    def _do(self, job: Job) -> None:
        started = monotonic()
        error: BaseException | None = None
        try:
            if not job.cancelled:
                job.work(job)
        except Cancelled:
            pass
        except BaseException as raised:
            error = raised
            if ApiError.of(raised).status == 500:
                log.exception("a request failed")
        job.end(error or job.failure)
        if not job.cancelled:
            self._seconds += 0.2 * (monotonic() - started - self._seconds)
