"""The commands' help as it stands in the README: `python -m racer_local.cli.manual README.md` brings it up to date."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from racer_local.cli import build_parser
from racer_local.cli.parsing import WIDEST, leaves

BEGIN, END = "<!-- help: made by `make readme` -->", "<!-- end of help -->"


def manual() -> str:
    """Markdown with the help of every command."""
    os.environ["COLUMNS"] = str(WIDEST + 2)
    parser = build_parser()
    parts = [_folded(each.prog, each.format_help()) for each in (parser, *leaves(parser))]
    return "\n\n".join([BEGIN, *parts, END])


def renewed(readme: str) -> str:
    """The text with what stands between the marks made anew."""
    before, rest = readme.split(BEGIN)
    return before + manual() + rest.split(END)[1]


def _folded(title: str, text: str) -> str:
    return f"<details><summary><code>{title}</code></summary>\n\n```\n{text.strip()}\n```\n\n</details>"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
