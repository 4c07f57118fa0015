"""An answer on a terminal while it grows: Markdown by blocks, or plain text with its tokens' sources as colours."""

from __future__ import annotations

import re
from time import monotonic

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from racer_local.chat.blocks import cut, is_code, split
from racer_local.chat.texts import printable
from racer_local.pieces import Piece
from racer_local.tree import Source

COLOURS = {Source.CONTEXT: "bright_blue", Source.LOGITS: "yellow", Source.CORPUS: "green"}
"""Those of the server's page."""
INTERVAL = 0.08
"""Seconds between two drawings of the block that grows, at least."""
SHARE = 10
"""Drawing takes at most one part in so many of the time."""
LIVE_ROWS = 4
"""Rows of a growing block from which on it is cut, where it can be."""
NARROW = 50
"""Columns below which a table is shown as it was written."""
WAITING = "…"
"""Stands where the first word will."""
_STYLES = re.compile("\x1b\\[[0-9;]*m")
_PADDING = re.compile("[ ]+((?:\x1b\\[[0-9;]*m)*)$")
_BEGIN, _END = "\x1b[?2026h\x1b[?25l", "\x1b[?25h\x1b[?2026l"
"""One update of the screen, without the cursor running over it."""


def markdown(text: str, width: int) -> Markdown:
    """Nothing that the model wrote is hidden: HTML, link targets and single line feeds are shown."""
    shown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    parser = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").disable(["image", "reference"])
    if width >= NARROW:
        parser.enable("table")
    shown.parsed = parser.parse(text)
    for token in shown.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return shown


class MarkdownWriter:
    """Finished blocks are printed for good, and what of a long one can stand alone; the rest is drawn over as it grows.

    That is kept small: what a window made narrower pushes out of sight can't be drawn over any more.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        """What is not printed for good."""
        self._printed = self._goes_on = False
        """Whether anything is, and whether the text goes on in the block printed last."""
        self._code = ""
        """The part of an open code fence that is printed; how the rest is highlighted depends on it."""
        self._live: list[str] = []
        """Lines that can be drawn over; the cursor stands at the end of the last one, and moves with it when the window
        does."""
        self._width = console.width
        """Columns when they were drawn."""
        self._next = 0.0
        """When the growing block may be drawn again."""
        self._draw([], [WAITING])

    def write(self, piece: Piece) -> None:
        self._text += printable(piece.text)
        started = monotonic()
        if started >= self._next:
            finished, self._text = split(self._text)
            good = self._blocks(finished)
            live = self._lines(self._text)
            if len(live) > LIVE_ROWS and (parts := cut(self._text)):
                code = self._with_code(parts.head) if is_code(parts.head) else ""
                good += self._blocks([parts.head])
                self._text, self._goes_on, self._code = parts.rest, True, code
                live = self._lines(self._text)
            most = max(1, (self._console.height - 2) // 2)
            live = self._spaced(live)[-most:] or ([] if self._printed else [WAITING])
            self._draw(good, live)
            self._next = monotonic() + max(INTERVAL, SHARE * (monotonic() - started))

    def close(self) -> None:
        finished, rest = split(self._text)
        self._draw(self._blocks([*finished, rest]), [])
        self._text = ""

    def above(self, text: str) -> None:
        """A line of something else, above what grows."""
        self._draw([text], self._live)

    def _blocks(self, blocks: list[str]) -> list[str]:
        lines: list[str] = []
        for block in blocks:
            if shown := self._lines(block):
                lines += self._spaced(shown)
                self._printed = True
            self._goes_on, self._code = False, ""
        return lines

    def _spaced(self, lines: list[str]) -> list[str]:
        """With an empty line before it, if a block begins there that is not the first."""
        return ["", *lines] if lines and self._printed and not self._goes_on else lines

    def _lines(self, text: str) -> list[str]:
        """A block's rendered lines, without those of its code that are printed."""
        if not text.strip():
            return []
        printed = len(lines_of(self._console, self._code)) if self._code else 0
        return lines_of(self._console, self._with_code(text))[printed:]

    def _with_code(self, text: str) -> str:
        return self._code + text.partition("\n")[2] if self._code else text

    def _draw(self, good: list[str], live: list[str]) -> None:
        """Put lines that stay, and lines that can be drawn over, in place of those drawn before."""
        width = max(1, self._console.width)
        up = min(sum(rows_of(line, width) for line in self._live), self._console.height) - 1
        back = f"\r\x1b[{up}A" if up > 0 else "\r"
        # Rows are drawn over, not erased first, so that nothing flickers; but a terminal that has reflowed them holds
        # some to be the rest of the row above. Each is cleared before it is written: behind a full row the cursor still
        # stands on its last character.
        erased = "\x1b[J" if width != self._width else ""
        stay = "".join(f"\x1b[K{line}\n" for line in [*good, *live[:-1]])
        self._console.file.write(f"{_BEGIN}{back}{erased}{stay}\x1b[J{''.join(live[-1:])}{_END}")
        self._console.file.flush()
        self._live, self._width = live, width


def lines_of(console: Console, text: str) -> list[str]:
    """Markdown's rendered lines, without the blanks at their ends and without empty lines around them."""
    with console.capture() as captured:
        console.print(markdown(text, console.width))
    lines = [_PADDING.sub(r"\1", line) for line in captured.get().split("\n")]
    full = [at for at, line in enumerate(lines) if _STYLES.sub("", line)]
    return lines[full[0] : full[-1] + 1] if full else []


def rows_of(line: str, width: int) -> int:
    """Rows of the screen that a line takes."""
    return max(1, -(-cell_len(_STYLES.sub("", line)) // width))


class TextWriter:
    """Text as it comes; with `tint`, drafted tokens in their source's colour."""

    def __init__(self, console: Console, tint: bool) -> None:
        self._console, self._tint = console, tint

    def write(self, piece: Piece) -> None:
        text = printable(piece.text)
        source = piece.tokens[-1].source if piece.tokens else Source.ROOT
        if self._tint and source in COLOURS and not self._console.no_color:
            with self._console.capture() as captured:
                self._console.print(Text(text, COLOURS[source]), end="", soft_wrap=True)
            text = captured.get()
        self._console.file.write(text)
        self._console.file.flush()

    def above(self, text: str) -> None:
        """A line of something else."""
        self._console.file.write(f"{text}\n")

    def close(self) -> None:
        self._console.file.write("\n")
        self._console.file.flush()


def legend(console: Console) -> Text:
    """What the colours mean."""
    if console.no_color:
        return Text("tint: NO_COLOR is set, so nothing is coloured")
    names = (Text(source.name.lower(), colour) for source, colour in COLOURS.items())
    return Text.assemble("drafted from ", Text(" ").join(names), "; the rest is the model's own")
