"""`racer-local chat`: a chat in the terminal, or through a pipe."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racer_local import models
from racer_local.cli.messages import error, report, tell
from racer_local.cli.options import add_model, context_from_args, from_args, model_from_args
from racer_local.cli.parsing import INTERRUPTED, add_command
from racer_local.cli.process import interruptible, show_any_character
from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError

if TYPE_CHECKING:
    from racer_local.chat.front import Front

DESCRIPTION = """\
Chat with a model: answers stream as Markdown, Ctrl-C stops one, /help lists what else can be done. The chat is kept, so
that --continue goes on with it. In a pipe each line is a message or a command, and only answers go to stdout."""
EXAMPLES = (
    ("racer-local chat -m smollm2-135m", "a model by its name in the registry"),
    ("racer-local chat -m smollm2-135m --continue", "goes on with the last chat, also after a crash"),
    ("printf 'Hi!\\n/stats\\n' | racer-local chat -m smollm2-135m", "a chat from a file or another program"),
)


def add_parser(commands: Any) -> None:
    parser = add_command(commands, "chat", help="chat in the terminal", description=DESCRIPTION, examples=EXAMPLES)
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--continue", dest="goes_on", action="store_true", help="go on with the chat that was kept last")
    start.add_argument("--load", type=Path, metavar="FILE", help="go on with a chat that /save wrote")
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens of an answer; default: fill the context")
    parser.add_argument("--no-markdown", action="store_true", help="show answers as the model writes them")
    add_model(parser, ContextConfig, DraftConfig, SamplingConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # All that can be wrong without the model is found before it is loaded.
    sampling, draft = from_args(SamplingConfig, args), from_args(DraftConfig, args)
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be 1 or more")
    path = models.find(args.model)
    context, config = context_from_args(args, path), model_from_args(args)
    messages = _messages(args)
    if draft.corpora:
        from racer_local.corpus.shelf import check_indexes

        check_indexes(draft.corpora)
    show_any_character()
    with ExitStack() as opened:
        with interruptible() as cancelled:
            from racer_local.chat.chat import Chat
            from racer_local.cli.generate import describe
            from racer_local.llama import Model
            from racer_local.session import Session

            front = _front(args)
            model = opened.enter_context(Model(path, config))
            if not model.chat_template:
                raise ConfigError(f"{path.name} carries no chat template; use it with: racer-local generate --raw")
            session = opened.enter_context(Session(model, context, draft, notify=front.note))
            for note in session.notes:
                front.note(f"note: {note}")
        if cancelled():
            return INTERRUPTED
        chat = Chat(
            session,
            path.stem,
            front,
            sampling=sampling,
            describe=describe,
            max_tokens=args.max_tokens,
            messages=messages,
        )
        return chat.run()


def _messages(args: argparse.Namespace) -> list[dict[str, str]]:
    """What the chat begins with."""
    from racer_local.chat.conversation import Conversation, kept_path, read
    from racer_local.chat.texts import clean

    if args.goes_on and not kept_path().exists():
        raise ConfigError("there is no chat to go on with yet; leave out --continue")
    messages = read(kept_path()) if args.goes_on else read(args.load) if args.load else []
    conversation = Conversation(messages)
    if args.system:
        conversation.system = clean(args.system)
    return conversation.messages


def _front(args: argparse.Namespace) -> Front:
    from racer_local.chat.plain import Plain

    if sys.stdin.isatty() and sys.stdout.isatty():
        from racer_local.chat.commands import COMMANDS
        from racer_local.chat.terminal import Terminal

        return Terminal(COMMANDS, markdown=not args.no_markdown)
    return Plain(sys.stdin.buffer, sys.stdout, say=report, note=tell, error=error)
