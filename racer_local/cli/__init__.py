"""The `racer-local` command: parse, call, print. No generation logic lives here.

Each module of this package holds one command: `add_parser(commands)` declares it, and the function it sets
as `run` takes the parsed arguments and returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from racer_local import __version__
from racer_local.errors import RacerError

COMMANDS = ("generate", "serve", "models", "index", "profile", "doctor", "bench")


class _Parser(argparse.ArgumentParser):
    """argparse, but a usage error is one line: what is wrong and where the help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="racer-local", description="Local GGUF models, faster, with the same text.")
    parser.add_argument("--version", action="version", version=f"racer-local {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"racer_local.cli.{name}").add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    try:
        args = build_parser().parse_args(argv)
        return int(args.run(args))
    except RacerError as error:
        print(f"racer-local: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"racer-local: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
