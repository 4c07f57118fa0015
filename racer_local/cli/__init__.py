"""The `racer-local` command: parse, call, print. No generation logic lives here.

Each module of this package holds one command: `add_parser(commands)` declares it, and the function it sets
as `run` takes the parsed arguments and returns the exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from racer_local import __version__
from racer_local.cli import messages
from racer_local.cli.parsing import INTERRUPTED, Parser, add_messages, exit_status, leaves
from racer_local.errors import RacerError

COMMANDS = ("generate", "run", "chat", "serve", "models", "index", "profile", "tune", "doctor", "bench", "completion")
NOTES = f"""\
racer-local COMMAND --help says more, with examples.

environment:
  RACER_LOCAL_HOME      folder for models, measurements and chats
                        (default: racer_local in the user's cache folder)
  RACER_LOCAL_API_KEYS  keys of the server's clients, with commas between
  RACER_LOCAL_SKIP_PROBE=1, RACER_LOCAL_SKIP_MEMORY_CHECK=1
                        load a model without a check that the build runs here,
                        or that it fits into memory
  NO_COLOR              no colours

{exit_status()}"""


def build_parser() -> Parser:
    parser = Parser(prog="racer-local", description="Local GGUF models, faster, with the same text.", epilog=NOTES)
    parser.add_argument("--version", action="version", version=f"racer-local {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        import_module(f"racer_local.cli.{name}").add_parser(commands)
    for leaf in leaves(parser):
        add_messages(leaf)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    messages.configure()
    try:
        args = build_parser().parse_args(argv)
        messages.configure(quiet=args.quiet, log_json=args.log_json)
        return int(args.run(args))
    except RacerError as error:
        messages.error(str(error))
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        messages.error(str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
