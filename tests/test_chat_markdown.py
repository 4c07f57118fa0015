"""How a growing answer is cut into blocks and drawn on a terminal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from racer_local.chat.blocks import Cut, cut, split

MARKDOWN = """# Title
A paragraph
of two lines.

- one
- two

  more of two

- three

After it.
```python
a = 1

b = 2
```
1. first

   ```
   # no heading

   ```
2. second

~~~
```
~~~
The end"""


def test_finished_blocks_are_cut_where_nothing_that_follows_changes_them():
    finished, rest = split(MARKDOWN)
    assert finished == [
        "# Title\n",
        "A paragraph\nof two lines.\n\n",
        "- one\n- two\n\n  more of two\n\n- three\n\n",
        "After it.\n",
        "```python\na = 1\n\nb = 2\n```\n",
        "1. first\n\n   ```\n   # no heading\n\n   ```\n2. second\n\n",
        "~~~\n```\n~~~\n",
    ]
    assert rest == "The end"


@pytest.mark.parametrize("text", ["One.\n\nTw", "- a\n\n-", "- a\n\n1", "```\nx\n\ny\n``", "para\n", "``` a`b\n"])
def test_what_may_still_change_is_not_finished(text):
    assert split(text).rest in (text, "Tw")


@given(st.text(st.sampled_from("ab \n`-#1.~"), max_size=60), st.integers(1, 5))
def test_growing_text_gives_the_same_text_whatever_its_pieces(text, size):
    shown, rest = [], ""
    for at in range(0, len(text), size):
        finished, rest = split(rest + text[at : at + size])
        shown += finished
    assert "".join(shown) + rest == text


@pytest.mark.parametrize("size", [1, 3, 7])
def test_growing_markdown_is_cut_into_the_same_blocks_as_whole(size):
    shown, rest = [], ""
    for at in range(0, len(MARKDOWN), size):
        finished, rest = split(rest + MARKDOWN[at : at + size])
        shown += finished
    assert (shown, rest) == tuple(split(MARKDOWN))


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ("- a\n- b\n- c", Cut("- a\n- b\n", "- c")),
        ("1. a\n   - b\n\n2. c\n   - d\n", Cut("1. a\n   - b\n\n", "2. c\n   - d\n")),
        ("- a\n- ```\n- b\n  ```\n  c", Cut("- a\n", "- ```\n- b\n  ```\n  c")),
        ("```py\na\n\nb\nc\nd", Cut("```py\na\n\nb\nc\n", "```py\nd")),
        ("```py\na\n\nb", None),
        ("```py\na", None),
        ("- a", None),
        ("``` a`b\nc\nd\n", None),
        ("a paragraph\n- b", None),
        ("", None),
    ],
)
def test_a_long_list_or_code_is_cut_where_both_parts_look_as_in_the_whole(block, parts):
    assert cut(block) == parts


class Screen:
    """A terminal that understands what the live block writes: lines, up, erase."""

    def __init__(self, width):
        self.width, self.rows, self.at, self.column = width, [""], 0, 0

    def write(self, text):
        for part in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|[^\x1b]", text):
            if part == "\n":
                self._down()
            elif part == "\r":
                self.column = 0
            elif part.endswith("A") and part[0] == "\x1b":
                self.at -= int(part[2:-1])
                assert self.at >= 0
            elif part == "\x1b[J":
                del self.rows[self.at + 1 :]
                self.rows[self.at] = self.rows[self.at][: self.column]
            elif part == "\x1b[K":
                self.rows[self.at] = self.rows[self.at][: self.column]
            elif part[0] != "\x1b":
                if self.column == self.width:
                    self._down()
                row = self.rows[self.at]
                self.rows[self.at] = row[: self.column] + part + row[self.column + 1 :]
                self.column += 1

    def _down(self):
        self.at, self.column = self.at + 1, 0
        self.rows += [""] * (self.at + 1 - len(self.rows))

    def flush(self):
        pass


def grown(text, width, height=10, colours=None):
    """The screen after an answer, and how many times it was drawn."""
    from rich.console import Console

    from racer_local.chat.render import MarkdownWriter
    from racer_local.pieces import Piece

    screen = Screen(width)
    console = Console(width=width, height=height, color_system=colours, force_terminal=True, file=screen)
    writer = MarkdownWriter(console)
    for at in range(0, len(text), 3):
        writer._next = 0.0
        writer.write(Piece(text[at : at + 3], []))
    writer.close()
    return [row.rstrip() for row in screen.rows]


@pytest.mark.parametrize("width", [12, 20, 80])
def test_a_grown_answer_stands_on_the_screen_once_and_as_if_it_had_come_whole(width):
    from rich.console import Console

    from racer_local.chat.render import lines_of

    code = "".join(f"    line{n} = {n}\n" for n in range(30))
    code = f"    text = '''\n{code}    '''\n    \n"
    items = "".join(f"- item {n} of a list\n" for n in range(30))
    text = f"{MARKDOWN}\n\n{items}\n```python\n{code}```\n" + "word " * 200 + "\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    rows = [row for row in grown(text, width) if row]
    console = Console(width=width, color_system=None, force_terminal=True)
    whole = [line.rstrip() for line in lines_of(console, text) if line.strip()]
    assert rows == whole


def test_a_note_that_comes_while_an_answer_grows_stands_above_it():
    from rich.console import Console

    from racer_local.chat.render import MarkdownWriter
    from racer_local.pieces import Piece

    screen = Screen(40)
    writer = MarkdownWriter(Console(width=40, height=10, color_system=None, force_terminal=True, file=screen))
    writer.above("compiling")
    writer.write(Piece("An answer", []))
    writer.close()
    assert [row for row in screen.rows if row] == ["compiling", "An answer"]


def test_html_and_single_line_feeds_and_link_targets_are_shown():
    shown = "\n".join(grown("A <b>bold</b>\nsecond [link](http://x.y)\n\n<div>\n\n![alt](u.png)", 60))
    for part in ("<b>bold</b>\nsecond", "http://x.y", "<div>", "u.png"):
        assert part in shown


def test_only_as_many_parts_of_the_status_are_shown_as_fit():
    from racer_local.chat.terminal import fitting

    assert fitting(["100 left", "racer"], 20) == "100 left · racer"
    assert fitting(["100 left", "racer"], 12) == "100 left"
    assert fitting(["100 left", "x"], 5) == "100\nleft"
