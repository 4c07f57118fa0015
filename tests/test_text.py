from __future__ import annotations

import pytest

from racer_local.text import Detokenizer


@pytest.mark.parametrize("text", ["plain", "héllo wörld", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_joined_stream_equals_the_whole_and_never_shows_half_a_character(text, size):
    raw = text.encode()
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    stream = Detokenizer(pieces.__getitem__)
    shown = [stream.push(i) for i in range(len(pieces))]
    assert "".join(shown) + stream.flush() == text
    assert not any("�" in part for part in shown)


def test_a_cut_character_becomes_a_replacement_at_the_end():
    stream = Detokenizer([b"ok", "é".encode()[:1]].__getitem__)
    assert [stream.push(0), stream.push(1), stream.flush()] == ["ok", "", "�"]


def test_bytes_that_are_no_utf8_do_not_raise():
    stream = Detokenizer([b"\xff\xfe", b"a"].__getitem__)
    assert stream.push(0) + stream.push(1) + stream.flush() == "��a"
