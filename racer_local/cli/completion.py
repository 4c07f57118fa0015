"""`racer-local completion`: what a shell needs to complete commands, options and files."""

from __future__ import annotations

import argparse
from typing import Any

from racer_local.cli.parsing import add_command

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
DESCRIPTION = """\
Print the completion script of a shell, made from the commands and options of this version."""
EXAMPLES = (
    ("racer-local completion bash > ~/.local/share/bash-completion/completions/racer-local", "bash, from now on"),
    ("racer-local completion zsh > ~/.zfunc/_racer-local", "zsh, with ~/.zfunc in fpath before compinit"),
    ("racer-local completion fish > ~/.config/fish/completions/racer-local.fish", "fish"),
)


def add_parser(commands: Any) -> None:
    what = "print a shell's completion script"
    parser = add_command(commands, "completion", help=what, description=DESCRIPTION, examples=EXAMPLES)
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import shtab

    from racer_local.cli import build_parser

    print(shtab.complete(_with_files(build_parser()), shell=args.shell))
    return 0


def _with_files(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser, whose options for files complete to files."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                _with_files(child)
        elif action.dest in ("model", "corpora", "corpus", "remember", "output", "paths", "index", "data", "trace"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser
