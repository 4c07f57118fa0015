"""From token bytes to text that can be shown while it grows."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class Detokenizer:
    """Joins token bytes to text, holding back bytes until a character is whole.

    An emoji may be spread over several tokens. The joined output equals the text decoded at once.

    >>> stream = Detokenizer([b"h", "é".encode()[:1], "é".encode()[1:]].__getitem__)
    >>> [stream.push(token) for token in (0, 1, 2)]
    ['h', '', 'é']
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        """What is left at the end; a cut character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
