"""Where a text ends: stop strings in bytes that come piece by piece, and completions cut there."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from racer_local.llm.completion import Answer, Likely, Progress, Token, chunks, describe, text_of
from racer_local.text import StopMatcher

# --- the matcher ---


def passes(data, stops):
    """(bytes that pass so far, whether a stop string is there), looked up in all the data at once."""
    starts = [data.find(stop) for stop in stops if stop and stop in data]
    if starts:
        return min(starts), True
    begun = [n for n in range(len(data) + 1) if any(stop.startswith(data[len(data) - n :]) for stop in stops if stop)]
    return len(data) - max(begun, default=0), False


def pushed(stops, pieces):
    """What `push` says after each piece, as (bytes, found), and what `flush` says at the end."""
    matcher = StopMatcher(stops)
    said = [(matcher.push(piece), matcher.found) for piece in pieces]
    return said, matcher.flush()


few_bytes = st.lists(st.sampled_from(b"ab\n"), max_size=12).map(bytes)
some_stops = st.lists(st.lists(st.sampled_from(b"ab\n"), max_size=5).map(bytes), max_size=3)


@settings(max_examples=1500, deadline=None)
@given(pieces=st.lists(few_bytes, max_size=8), stops=some_stops)
@example(pieces=[b"a", b"a", b"a", b"b"], stops=[b"aab"])
@example(pieces=[b"ab", b"a", b"bb"], stops=[b"abb", b"babb"])
def test_the_matcher_says_after_each_piece_what_the_whole_text_says(pieces, stops):
    said, _ = pushed(stops, pieces)
    for text, now in zip(itertools.accumulate(pieces), said, strict=True):
        assert now == passes(text, stops)
        if now[1]:
            break


@settings(max_examples=1500, deadline=None)
@given(pieces=st.lists(few_bytes, max_size=8), stops=some_stops)
def test_nothing_of_a_stop_string_passes_and_nothing_else_is_held_back(pieces, stops):
    said, flushed = pushed(stops, pieces)
    text, counts = b"".join(pieces), [n for n, _ in said]
    assert counts == sorted(counts), "what passed stays passed"
    found = [i for i, (_, found) in enumerate(said) if found]
    for i, count in enumerate(counts):
        held = text[count : len(b"".join(pieces[: i + 1]))]
        assert not any(stop in text[:count] for stop in stops if stop)
        if i not in found:
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    if found:
        at = counts[found[0]]
        assert {*counts[found[0] :], flushed} == {at}, "once found, nothing more passes"
        assert any(text[at:].startswith(stop) for stop in stops if stop)
    else:
        assert flushed == len(text), "what was held back passes if no more comes"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("日本🎉👩‍👧é.", max_size=12),
    stops=st.lists(st.text("日本🎉👩‍👧é.", min_size=1, max_size=2), min_size=1, max_size=2),
    size=st.integers(1, 5),
)
def test_stops_of_several_bytes_a_character_end_the_text_between_characters(text, stops, size):
    raw = text.encode()
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    _, flushed = pushed([stop.encode() for stop in stops], pieces)
    shown = raw[:flushed].decode()
    if any(stop in text for stop in stops):
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
        assert not any(stop in shown for stop in stops)
    else:
        assert shown == text


@pytest.mark.parametrize(
    ("stops", "pieces", "said", "flushed"),
    [
        ([b"END", b"\n\n"], [b"the E", b"N", b"D of"], [(4, False), (4, False), (4, True)], 4),
        ([b"END"], [b"the E", b"NDE", b"N"], [(4, False), (4, True), (4, True)], 4),
        ([b"END"], [b"the EN", b"ENx", b"EN"], [(4, False), (9, False), (9, False)], 11),
        ([b"later", b"soon"], [b"a soon b later"], [(2, True)], 2),
        ([b"abcd", b"bc"], [b"abc", b"d"], [(1, True), (1, True)], 1),
        ([b"abcd", b"bc"], [b"abcd"], [(0, True)], 0),
        ([b"", b"x"], [b"ab", b"", b"xy"], [(2, False), (2, False), (2, True)], 2),
        ([], [b"ab", b"c"], [(2, False), (3, False)], 3),
        ([b"\n"], [b"", b"\n"], [(0, False), (0, True)], 0),
        (["🎉".encode()], ["👩🎉".encode()[:5], "👩🎉".encode()[5:]], [(4, False), (4, True)], 4),
        (["🎉".encode()], ["👩🎊".encode()[:7], "👩🎊".encode()[7:]], [(4, False), (8, False)], 8),
    ],
)
def test_worked_examples_of_the_matcher(stops, pieces, said, flushed):
    assert pushed(stops, pieces) == (said, flushed)


# --- completions without a model ---


def tokens_of(pieces, top=1):
    """Tokens 0, 1, ... with these bytes; each one's log probability is its own number, negative."""
    return [
        Token(i, bytes(piece), Likely(-float(i), [(i, -float(i)), (100, -9.0)][:top])) for i, piece in enumerate(pieces)
    ]


def cut(text, *sizes):
    """The text's bytes in pieces of these sizes, in turn."""
    raw, turn = text.encode(), itertools.cycle(sizes)
    pieces = []
    while raw:
        n = next(turn)
        pieces.append(raw[:n])
        raw = raw[n:]
    return pieces


def name(token):
    return f"<{token}>"


def streamed(pieces, stops=(), offset=7, reason="length", text=name):
    """The choices of all chunks, and the progress that they were made from."""
    progress = Progress(StopMatcher([stop.encode() for stop in stops]))

    def steps():
        yield from tokens_of(pieces)
        progress.finish_reason = reason

    made = list(chunks(progress, steps(), Answer("tiny"), text, offset))
    assert len({chunk["id"] for chunk in made}) == 1
    assert {(chunk["object"], chunk["model"]) for chunk in made} == {("text_completion", "tiny")}
    return [chunk["choices"][0] for chunk in made], progress


def whole(pieces, stops=(), offset=7):
    """Text, log probabilities and number of tokens of the same answer where it is not streamed."""
    progress = Progress(StopMatcher([stop.encode() for stop in stops]))
    for token in tokens_of(pieces):
        progress.push(token)
        if progress.stops.found:
            break
    progress.finish()
    return text_of(progress.data), describe(progress.tokens, name, offset), len(progress.tokens)


def joined(choices):
    """Text and log probabilities of the chunks, put together."""
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    keys = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    return "".join(choice["text"] for choice in choices), {key: [x for one in told for x in one[key]] for key in keys}


def check_stream(pieces, stops=()):
    choices, progress = streamed(pieces, stops)
    text, logprobs = joined(choices)
    assert (text, logprobs, len(progress.tokens)) == whole(pieces, stops)
    assert len(logprobs["tokens"]) == len(progress.tokens), "usage counts the tokens that were told of"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert (choices[-1]["text"], choices[-1]["logprobs"]) == ("", None)
    assert not any(stop in text for stop in stops)
    return choices, progress


TEXTS = ("plain words", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉!", "é", "")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5,), (1, 4), (7, 1)], ids=repr)
def test_joined_chunks_equal_the_whole_text_however_characters_are_cut(text, sizes):
    choices, progress = check_stream(cut(text, *sizes))
    assert joined(choices)[0] == text
    assert len(progress.tokens) == len(cut(text, *sizes))
    assert choices[-1]["finish_reason"] == "length"
    assert "�" not in joined(choices)[0]


def test_tokens_that_share_a_character_come_together_with_all_their_log_probabilities():
    choices, _ = check_stream(cut("a🎉b日", 1, 2, 2, 2, 2))
    assert [choice["text"] for choice in choices] == ["a", "🎉", "b日", ""]
    logprobs = [choice["logprobs"] for choice in choices[:-1]]
    assert [told["token_logprobs"] for told in logprobs] == [[0.0], [-1.0, -2.0], [-3.0, -4.0]]
    assert [told["text_offset"] for told in logprobs] == [[7], [8, 8], [9, 10]]
    assert [told["top_logprobs"] for told in logprobs[1:2]] == [[{"<1>": -1.0, "": -1.0}, {"<2>": -2.0, "": -2.0}]]
    assert logprobs[2]["tokens"] == ["b", ""]


def test_a_character_that_is_cut_at_the_end_is_left_out():
    choices, progress = check_stream([b"ok", "🎉".encode()[:3]])
    assert [choice["text"] for choice in choices] == ["ok", "", ""]
    assert len(progress.tokens) == 2, "its token was generated and counts"


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "tokens", "reason"),
    [
        ([b"one", b" END", b" two"], ["END"], "one ", 2, "stop"),
        ([b"one", b" two END three", b" four"], ["END"], "one two ", 2, "stop"),
        ([b"one", b" E", b"N", b"D", b" two"], ["END"], "one ", 2, "stop"),
        ([b"one ", b"E", b"N", b"D", b" two"], ["END"], "one ", 1, "stop"),
        ([b"one ", b"E", b"N", b"d", b" two"], ["END"], "one ENd two", 5, "length"),
        ([b"one ", b"E", b"N"], ["END"], "one EN", 3, "length"),
        ([b"END", b"one"], ["END"], "", 0, "stop"),
        ([b"one soon late"], ["late", "soon"], "one ", 1, "stop"),
        ([b"one so", b"on late"], ["late", "soon"], "one ", 1, "stop"),
        ([b"a", "🎉".encode()[:2], "🎉".encode()[2:], b"b"], ["🎉"], "a", 1, "stop"),
        ([b"a", "🎉".encode()[:2], "🎊".encode()[2:], b"b"], ["🎉"], "a🎊b", 4, "length"),
        (["日本".encode()[:4], "日本".encode()[4:], b"x"], ["本"], "日", 1, "stop"),
        ([b"x", b"", b"y", b"END"], ["END"], "xy", 3, "stop"),
        ([b"x", b"y", b"", b"END"], ["END"], "xy", 3, "stop"),
        ([b"x\n", b"\ny"], ["\n\n"], "x", 1, "stop"),
        ([], ["END"], "", 0, "length"),
    ],
    ids=repr,
)
def test_text_tokens_and_log_probabilities_are_cut_at_the_same_place(pieces, stops, text, tokens, reason):
    choices, progress = check_stream(pieces, stops)
    assert (joined(choices)[0], len(progress.tokens), choices[-1]["finish_reason"]) == (text, tokens, reason)


def test_what_may_begin_a_stop_string_is_held_and_the_rest_is_not():
    progress, shown = Progress(StopMatcher([b"END"])), []
    pieces = [b"one", b" E", b"N", b"x", b"E"]

    def steps():
        for token in tokens_of(pieces):
            yield token
            shown.append("".join(seen))

    seen = []
    for chunk in chunks(progress, steps(), Answer("tiny"), None, 0):
        seen.append(chunk["choices"][0]["text"])
    assert shown == ["one", "one", "one", "one ENx", "one ENx"]
    assert seen == ["one", " E", "N", "x", "E", ""]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_chunk_says_why_it_ended(reason):
    choices, _ = streamed([b"a", b"b"], reason=reason)
    assert [choice["finish_reason"] for choice in choices] == [None, None, reason]
    assert streamed([b"aEND"], ["END"], reason="length")[0][-1]["finish_reason"] == "stop"


def test_without_log_probabilities_the_chunks_have_none():
    choices, _ = streamed(cut("a🎉b", 3), text=None)
    assert {choice["logprobs"] for choice in choices} == {None}
    assert "".join(choice["text"] for choice in choices) == "a🎉b"


def test_no_token_is_asked_for_behind_a_stop_string():
    progress, asked = Progress(StopMatcher([b"b"])), []

    def steps():
        for token in tokens_of([b"a", b"b", b"c"]):
            asked.append(token.id)
            yield token

    list(chunks(progress, steps(), Answer("tiny"), None, 0))
    assert asked == [0, 1]


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab日🎉é\n", max_size=16),
    stops=st.lists(st.text("ab日🎉é\n", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_any_text_cut_anywhere_gives_the_same_streamed_and_whole(text, stops, sizes):
    pieces = cut(text, *sizes)
    choices, progress = check_stream(pieces, stops)
    shown = joined(choices)[0]
    assert text.startswith(shown)
    if not progress.stops.found:
        assert shown == text
        assert not any(stop in text for stop in stops)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.lists(st.sampled_from([*b"ab", *"日🎉".encode(), 0xFF]), max_size=3).map(bytes), max_size=8))
@example(pieces=[b"\xe3", b"\xe3", b"\x81", b"\x82"])
@example(pieces=[b"\xff\xe6", b"\x97\xa5"])
def test_bytes_that_are_no_text_are_left_out_of_the_stream_as_of_the_whole(pieces):
    check_stream(pieces)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.lists(st.sampled_from(b"ab"), max_size=2).map(bytes), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
@example(pieces=[b"a", b"", b"b"], stops=["b"])
def test_tokens_without_bytes_count_alike_streamed_and_whole(pieces, stops):
    """Control tokens have none."""
    check_stream(pieces, stops)


# --- log probabilities ---


@pytest.mark.parametrize("count", [0, 1, 5, 50, 300, 1000])
def test_log_probabilities_are_the_softmax_of_the_row(count):
    row = (np.random.default_rng(count).normal(size=300) * 100).astype(np.float32)
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    likely = Likely.of(row, 5, count)
    assert likely.logprob == pytest.approx(exact[5], abs=1e-3)
    best = np.argsort(-row)[:count]
    assert [token for token, _ in likely.top] == best.tolist()
    assert [logprob for _, logprob in likely.top] == pytest.approx(exact[best].tolist(), abs=1e-3)


def test_the_drawn_token_is_among_the_likeliest_that_are_told_even_where_it_is_not_one_of_them():
    likely = Likely.of(np.array([3.0, 2.0, 1.0, 0.0], np.float32), 3, 2)
    told = describe([Token(3, b"d", likely), Token(0, b"e")], name, 4)
    assert list(told["top_logprobs"][0]) == ["<0>", "<1>", "d"]
    assert told["top_logprobs"][0]["d"] == told["token_logprobs"][0] == likely.logprob
    assert (told["token_logprobs"][1], told["top_logprobs"][1], told["text_offset"]) == (None, None, [4, 5])
