"""One caller at a time: calls queue, and a stream keeps its turn until it ends or is closed."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest

from racer_local.llm import turn as turn_module
from racer_local.llm.turn import Turn

BLINK = 0.1


def count(n=3):
    yield from range(n)


def in_thread(work):
    """Starts `work` in a thread; what it returns, or raises, is in `box`."""
    box = []

    def run():
        try:
            box.append(work())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, box


def take(turn):
    with turn:
        return "had it"


def waits(thread):
    thread.join(BLINK)
    return thread.is_alive()


def ends(thread):
    thread.join(10)
    return not thread.is_alive()


def is_free(turn):
    thread, box = in_thread(lambda: take(turn))
    return ends(thread) and box == ["had it"] and not turn.waits_to_be_read()


def test_calls_queue():
    turn, inside, most = Turn(), [], []

    def work():
        for _ in range(5):
            with turn:
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [in_thread(work) for _ in range(4)]
    assert all(ends(thread) for thread, _ in threads)
    assert most == [1] * 20


def test_streams_of_several_threads_queue_as_a_whole():
    turn, said = Turn(), []

    def work(name):
        for item in turn.stream(count):
            said.append((name, item))
            time.sleep(0.001)

    threads = [in_thread(lambda name=name: work(name)) for name in "abcd"]
    assert all(ends(thread) for thread, _ in threads)
    runs = [[item for _, item in run] for _, run in itertools.groupby(said, lambda pair: pair[0])]
    assert runs == [[0, 1, 2]] * 4


def test_a_stream_gives_what_its_generator_gives_and_frees_the_turn():
    turn = Turn()
    assert list(turn.stream(count)) == [0, 1, 2]
    assert list(turn.stream(lambda: count(0))) == []
    assert is_free(turn)


def test_a_half_read_stream_keeps_its_turn_and_closing_it_lets_the_next_one_in():
    turn = Turn()
    stream = turn.stream(count)
    assert next(stream) == 0
    assert turn.waits_to_be_read()
    thread, box = in_thread(lambda: take(turn))
    assert waits(thread)
    assert next(stream) == 1
    assert waits(thread)
    stream.close()
    assert ends(thread)
    assert box == ["had it"]
    assert not turn.waits_to_be_read()
    assert take(turn)


def test_closing_it_closes_what_it_reads_from_before_the_next_one_is_in():
    turn, order = Turn(), []

    def items():
        try:
            yield from range(3)
        finally:
            order.append("closed")

    stream = turn.stream(items)
    next(stream)
    thread, _ = in_thread(lambda: take(turn) and order.append("next"))
    assert waits(thread)
    stream.close()
    assert ends(thread)
    assert order == ["closed", "next"]


def test_an_abandoned_stream_frees_its_turn():
    turn = Turn()
    stream = turn.stream(count)
    next(stream)
    thread, box = in_thread(lambda: take(turn))
    assert waits(thread)
    del stream
    gc.collect()
    assert ends(thread)
    assert box == ["had it"]


@pytest.mark.parametrize("end", ["close", "read", "abandon", "throw"])
def test_a_stream_may_be_read_on_and_ended_by_another_thread(end):
    turn = Turn()
    box = [turn.stream(count)]
    assert next(box[0]) == 0

    def work():
        stream = box.pop()
        read = [next(stream)]
        if end == "read":
            read += stream
        elif end == "close":
            stream.close()
        elif end == "throw":
            with pytest.raises(KeyError):
                stream.throw(KeyError())
        del stream
        return read

    thread, read = in_thread(work)
    assert ends(thread)
    assert read == [[1, 2] if end == "read" else [1]]
    assert take(turn)
    assert is_free(turn)


def test_while_one_thread_reads_the_thread_that_began_the_stream_waits():
    turn, reads, go = Turn(), threading.Event(), threading.Event()

    def items():
        yield 0
        reads.set()
        go.wait(10)
        yield 1

    stream = turn.stream(items)
    next(stream)
    reader, read = in_thread(lambda: list(stream))
    assert reads.wait(10)
    asker, had = in_thread(lambda: take(turn))
    assert waits(asker)
    assert not turn.waits_to_be_read(), "it is being read"
    go.set()
    assert take(turn)
    assert ends(reader)
    assert ends(asker)
    assert (read, had) == ([[1]], ["had it"])


def test_whoever_has_the_turn_may_take_it_again():
    turn, others = Turn(), []

    def work():
        with turn, turn:
            read = list(turn.stream(count))
            others.append(in_thread(lambda: take(turn))[0])
            return read, waits(others[0])

    thread, box = in_thread(work)
    assert ends(thread)
    assert box == [([0, 1, 2], True)]
    assert ends(others[0])
    assert is_free(turn)


def test_a_streams_own_work_may_take_the_turn_again_on_whichever_thread():
    turn = Turn()

    def items():
        for item in range(4):
            with turn:
                yield from turn.stream(lambda item=item: once(item))

    def once(item):
        with turn:
            yield item

    stream = turn.stream(items)
    assert next(stream) == 0
    thread, read = in_thread(lambda: next(stream))
    assert ends(thread)
    assert read == [1]
    assert list(stream) == [2, 3]
    assert is_free(turn)


def test_a_half_read_stream_within_a_stream_is_closed_with_it():
    turn = Turn()

    def items():
        inner = turn.stream(count)
        for item in inner:
            yield item
            if item == 1:
                break
        del inner
        yield "behind"

    assert list(turn.stream(items)) == [0, 1, "behind"]
    assert is_free(turn)
    stream = turn.stream(items)
    next(stream)
    assert turn.waits_to_be_read()
    stream.close()
    assert is_free(turn)


def test_a_stream_begun_within_a_turn_outlives_it():
    turn = Turn()
    with turn:
        stream = turn.stream(count)
        next(stream)
    thread, _ = in_thread(lambda: take(turn))
    assert waits(thread), "the stream keeps the turn"
    stream.close()
    assert ends(thread)
    assert is_free(turn)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_exception_in_the_generator_frees_the_turn(at):
    turn = Turn()

    def items():
        yield from range(at)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(turn.stream(items))
    assert is_free(turn)


def test_an_exception_while_it_is_made_frees_the_turn():
    turn = Turn()
    with pytest.raises(ZeroDivisionError):
        next(turn.stream(lambda: 1 / 0))
    assert is_free(turn)


def test_an_exception_in_a_turn_frees_it():
    turn = Turn()
    with pytest.raises(ValueError, match="within"), turn, turn:
        raise ValueError("within")
    assert is_free(turn)


def test_a_stream_that_was_never_started_takes_no_turn_and_makes_nothing():
    turn, made = Turn(), []
    stream = turn.stream(lambda: made.append(1) or count())
    assert is_free(turn)
    assert not turn.waits_to_be_read()
    stream.close()
    assert is_free(turn)
    assert made == []


@pytest.mark.parametrize("alone", [True, False], ids=["nobody else", "others that do not read on"])
@pytest.mark.parametrize("ask", [take, lambda turn: next(turn.stream(count))], ids=["call", "stream"])
def test_waiting_for_ones_own_open_stream_is_an_error_that_names_the_way_out(monkeypatch, alone, ask):
    turn = Turn()
    monkeypatch.setattr(threading, "active_count", lambda: 1 if alone else 2)
    monkeypatch.setattr(turn_module, "GRACE", 1e9 if alone else 0.0)

    def work():
        stream = turn.stream(count)
        next(stream)
        with pytest.raises(RuntimeError, match="a stream of this thread is still open; read it to its end or close"):
            ask(turn)
        return list(stream), ask(turn)

    thread, box = in_thread(work)
    assert ends(thread)
    assert box == [([1, 2], ask(Turn()))], "the stream itself goes on"


def test_with_others_about_the_thread_waits_for_its_own_stream():
    """Another thread may read it on, which is what a server does."""
    turn, asking = Turn(), threading.Event()
    stream = turn.stream(count)
    next(stream)

    def read():
        asking.wait(10)
        time.sleep(BLINK)
        return list(stream)

    thread, box = in_thread(read)
    asking.set()
    assert take(turn) == "had it"
    assert ends(thread)
    assert box == [[1, 2]]


@pytest.mark.parametrize("others", [1, 2])
def test_waiting_for_another_threads_stream_is_no_error(monkeypatch, others):
    monkeypatch.setattr(turn_module, "GRACE", 0.0)
    monkeypatch.setattr(threading, "active_count", lambda: others)
    turn = Turn()
    stream = turn.stream(count)
    next(stream)
    thread, box = in_thread(lambda: take(turn))
    assert waits(thread)
    stream.close()
    assert ends(thread)
    assert box == ["had it"]
