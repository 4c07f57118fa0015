from __future__ import annotations

import pytest

from racer_local.pieces import Progress, Token, pieces
from racer_local.text import StopMatcher


def shown(parts, stops=()):
    progress = Progress(StopMatcher([stop.encode() for stop in stops]))
    return [piece.text for piece in pieces(progress, (Token(i, part) for i, part in enumerate(parts)))]


@pytest.mark.parametrize("text", ["plain", "héllo wörld", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_joined_pieces_equal_the_whole_and_never_show_half_a_character(text, size):
    raw = text.encode()
    texts = shown([raw[i : i + size] for i in range(0, len(raw), size)])
    assert "".join(texts) == text
    assert not any("�" in part for part in texts)


def test_a_cut_character_is_left_out_at_the_end():
    assert shown([b"ok", "é".encode()[:1]]) == ["ok", ""]


def test_bytes_that_are_no_utf8_are_left_out_and_do_not_raise():
    assert "".join(shown([b"\xff\xfe", b"a"])) == "a"


def test_tokens_that_share_a_character_come_as_one_piece():
    raw = "🎉".encode()
    assert shown([b"a", raw[:2], raw[2:], b"b"]) == ["a", "🎉", "b"]
