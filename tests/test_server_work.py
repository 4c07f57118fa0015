from __future__ import annotations

import asyncio
import threading

import pytest

from racer_local.server import work
from racer_local.server.work import Job, Queue, Worker
from racer_local.wire.errors import ApiError


def run(main):
    """Runs `main(worker)`, whose worker has room for 4."""

    async def inside():
        worker = Worker(4)
        try:
            return await asyncio.wait_for(main(worker), 30)
        finally:
            assert worker.stop(5)

    return asyncio.run(inside())


async def words_of(job):
    return [word async for words in job.words() for word in words]


class Blocking:
    """Work that runs until it is let go or cancelled."""

    def __init__(self):
        self.started, self.go = threading.Event(), threading.Event()

    def __call__(self, job):
        self.started.set()
        job.tell("begun")
        while not (self.go.wait(0.01) or job.cancelled):
            pass
        job.tell("cancelled" if job.cancelled else "done")


async def started(worker, key="a"):
    blocking = Blocking()
    job = Job(key, blocking)
    worker.submit(job)
    await asyncio.to_thread(blocking.started.wait, 10)
    return blocking, job


def test_each_key_has_its_turn_however_many_another_one_has_waiting():
    queue = Queue(most=20)
    for key, job in [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("b", 5), ("c", 6), ("b", 7)]:
        assert queue.put(key, job) is None
    assert [queue.take() for _ in range(8)] == [1, 5, 6, 2, 7, 3, 4, None]


def test_a_queue_takes_no_more_than_it_may_and_knows_what_is_in_it():
    queue = Queue(most=2)
    assert queue.put("a", 1) is None
    assert queue.put("b", 2) is None
    assert queue.put("c", 3) == 3
    assert queue.remove("a", 1)
    assert not queue.remove("a", 1)
    assert queue.put("c", 3) is None
    assert queue.clear() == [2, 3]
    assert len(queue) == 0


def test_who_has_most_waiting_makes_room_for_the_others():
    queue = Queue(most=4)
    for number in range(4):
        assert queue.put("greedy", number) is None
    assert [queue.put("b", "b1"), queue.put("c", "c1"), queue.put("b", "b2")] == [3, 2, "b2"]
    assert queue.put("greedy", 4) == 4
    assert [queue.take() for _ in range(5)] == [0, "b1", "c1", 1, None]


def test_words_come_in_their_order_and_those_close_together_at_once():
    def talk(job):
        for number in range(50):
            job.tell(number)

    async def main(worker):
        job = Job("", talk)
        worker.submit(job)
        return [words async for words in job.words()]

    groups = run(main)
    assert [word for words in groups for word in words] == list(range(50))
    assert groups[0] == [0]
    assert len(groups) < 10


def test_words_within_a_step_wait_for_its_end(monkeypatch):
    monkeypatch.setattr(work, "FLUSH_S", -1)

    def talk(job):
        for number in range(6):
            job.tell(number, ends_step=number % 3 == 2)

    async def main(worker):
        job = Job("", talk)
        worker.submit(job)
        return [words async for words in job.words()]

    assert run(main) == [[0, 1, 2], [3, 4, 5]]


def test_what_the_work_raises_is_raised_behind_its_words():
    def fail(job):
        job.tell("said")
        raise ApiError(400, "no")

    async def main(worker):
        job, heard = Job("", fail), []
        worker.submit(job)

        async def listen():
            async for words in job.words():
                heard.extend(words)

        with pytest.raises(ApiError, match="no"):
            await listen()
        assert heard == ["said"]
        after = Job("", lambda job: job.tell("fine"))
        worker.submit(after)
        assert await words_of(after) == ["fine"]

    run(main)


def test_a_job_that_waits_is_taken_back_at_once_and_one_that_runs_within_a_step():
    async def main(worker):
        _, first = await started(worker)
        waiting = Job("b", lambda job: job.tell("never"))
        worker.submit(waiting)
        assert len(worker) == 1
        worker.cancel(waiting)
        assert len(worker) == 0
        assert await words_of(waiting) == []
        worker.cancel(first)
        assert await words_of(first) == ["begun", "cancelled"]
        assert worker.running is None or worker.running is not first

    run(main)


def test_too_many_are_told_when_to_come_again():
    async def main(worker):
        blocking, _ = await started(worker)
        for _ in range(4):
            worker.submit(Job("b", lambda job: None))
        with pytest.raises(ApiError, match="4 requests wait already") as caught:
            worker.submit(Job("b", lambda job: None))
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert int(caught.value.headers["Retry-After"]) >= 1
        blocking.go.set()

    run(main)


def test_a_worker_that_stops_finishes_what_runs_and_refuses_what_waits():
    async def main(worker):
        blocking, first = await started(worker)
        waiting = Job("b", lambda job: job.tell("never"))
        worker.submit(waiting)
        worker.drain()
        with pytest.raises(ApiError, match="the server is stopping") as caught:
            await words_of(waiting)
        assert caught.value.status == 503
        with pytest.raises(ApiError, match="the server is stopping"):
            worker.submit(Job("c", lambda job: None))
        blocking.go.set()
        assert await words_of(first) == ["begun", "done"]

    run(main)


def test_a_worker_whose_time_is_over_cancels_what_runs():
    async def main(worker):
        _, first = await started(worker)
        assert await asyncio.to_thread(worker.stop, 0.05)
        with pytest.raises(ApiError, match="the server is stopping") as caught:
            await words_of(first)
        assert caught.value.status == 503

    run(main)


def test_the_thread_is_gone_when_the_worker_has_stopped():
    before = threading.active_count()

    async def main(worker):
        assert threading.active_count() == before + 1

    run(main)
    assert threading.active_count() == before
