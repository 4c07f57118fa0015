"""An answer as it grows: its tokens, the bytes that no stop string can take back, and the pieces that can be shown."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from racer_local.text import StopMatcher
from racer_local.tree import Source


class Likely(NamedTuple):
    """What a row of logits says of the token drawn from it, and of the likeliest ones."""

    logprob: float
    top: list[tuple[int, float]]
    """Ids and log probabilities, likeliest first."""

    @classmethod
    def of(cls, row: NDArray[np.float32], token: int, count: int) -> Likely:
        """From the raw logits [vocabulary]: before penalties, temperature and whatever else shapes the draw."""
        shifted = row - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        count = min(count, len(row))
        near = np.argpartition(-row, count - 1)[:count] if count else np.zeros(0, np.intp)
        order = near[np.lexsort((-near, -row[near]))]
        return cls(float(log_probs[token]), [(int(i), float(log_probs[i])) for i in order])


class Token(NamedTuple):
    id: int
    data: bytes
    likely: Likely | None = None
    source: Source = Source.ROOT
    """Which source drafted it; ROOT: none, it is the bonus token that ends a step."""


@dataclass
class Progress:
    """An answer as it grows: tokens, the bytes that are known to be text, and why it ended."""

    stops: StopMatcher
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str = "length"
    safe: int = 0
    """Bytes that no stop string can take back."""

    def push(self, token: Token) -> None:
        self.tokens.append(token)
        self.safe = self.stops.push(token.data)

    def finish(self) -> None:
        """No more tokens come. Those behind a stop string's beginning are dropped."""
        self.safe = self.stops.flush()
        if self.stops.found:
            self.finish_reason = "stop"
            end, kept = 0, 0
            while kept < len(self.tokens) and end + len(self.tokens[kept].data[:1]) <= self.safe:
                end += len(self.tokens[kept].data)
                kept += 1
            del self.tokens[kept:]

    @property
    def data(self) -> bytes:
        """The text's bytes."""
        return b"".join(token.data for token in self.tokens)[: self.safe]


class Piece(NamedTuple):
    """Text that is whole and certain, and the tokens that it is of: several where they share a character."""

    text: str
    tokens: Sequence[Token]


def pieces(progress: Progress, steps: Iterable[Token]) -> Iterator[Piece]:
    """The answer's pieces, as soon as each is whole and no stop string can take it back; a stop string ends them."""
    given, passed = 0, 0

    def ready(last: bool) -> Iterator[Piece]:
        nonlocal given, passed
        while given < len(progress.tokens):
            group = _whole_characters(progress.tokens[given:])
            data = b"".join(token.data for token in group)
            if passed + len(data) > progress.safe or not _is_whole(data):
                if not last:
                    return
                data = data[: progress.safe - passed]
            given, passed = given + len(group), passed + len(data)
            yield Piece(text_of(data), group)

    for token in steps:
        progress.push(token)
        if progress.stops.found:
            break
        yield from ready(last=False)
    progress.finish()
    yield from ready(last=True)


def text_of(data: bytes) -> str:
    """Bytes as text; what is no UTF-8, a character cut at the end above all, is left out as llama_cpp does."""
    return data.decode("utf-8", errors="ignore")


def _whole_characters(tokens: Sequence[Token]) -> Sequence[Token]:
    """The fewest first tokens whose bytes end with a character; all, if none do."""
    data = b""
    for n, token in enumerate(tokens, 1):
        data += token.data
        if _is_whole(data):
            return tokens[:n]
    return tokens


def _is_whole(data: bytes) -> bool:
    """Whether no character is cut at the end. What is no UTF-8 at all will not get better by waiting."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return not decoder.getstate()[0]
