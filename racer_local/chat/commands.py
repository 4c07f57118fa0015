"""The slash commands: a table from which /help and completion are made, and what each does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path

from racer_local.chat.chat import Chat
from racer_local.chat.conversation import Conversation, kept_path, read, write
from racer_local.chat.texts import Call, shortened, typed_as
from racer_local.config import DRAFTERS
from racer_local.errors import ConfigError


@dataclass(frozen=True)
class Command:
    name: str
    argument: str
    """What may follow the name, as /help shows it."""
    help: str
    do: Callable[[Chat, str], None]
    files: bool = False
    """Whether a file name may follow."""
    choices: tuple[str, ...] = ()
    """Words that may follow."""

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


def call(chat: Chat, typed: Call, text: str) -> None:
    """Do what was typed. An unknown name is told with the nearest one, and `text` is back in the input line."""
    command = COMMANDS.get(typed.name)
    if command is None:
        nearest = [name for name in COMMANDS if typed.name and name.startswith(typed.name)]
        nearest = nearest or get_close_matches(typed.name, COMMANDS, 1, 0.4)
        meant = f"did you mean /{nearest[0]}?" if nearest else "/help lists them."
        chat.prefill = text
        raise ConfigError(f"there is no /{shortened(typed.name, 30)}; {meant} (// begins a message with a slash)")
    if typed.argument and not command.argument:
        raise ConfigError(f"{command.usage} takes nothing behind it")
    command.do(chat, typed.argument)


def _help(chat: Chat, argument: str) -> None:
    wide = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:<{wide}}  {command.help}" for command in COMMANDS.values()]
    lines.append('""" around several lines makes them one message; // begins a message with a slash')
    if chat.front.interactive:
        lines.append("Alt-Enter, or a \\ at the end of a line, begins another; Ctrl-R searches what you typed")
        lines.append("Ctrl-C stops an answer or clears the line; Ctrl-D quits")
    chat.front.say("\n".join(lines))


def _save(chat: Chat, argument: str) -> None:
    path = Path(argument) if argument else chat.file or Path(f"chat-{datetime.now():%Y%m%d-%H%M%S}.json")
    path = _absolute(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path.exists() and path not in chat.written:
        if not chat.front.interactive:
            raise ConfigError(f"{path} exists and was not written by this chat; name another file")
        if chat.front.choose(f"{path} exists. Replace it?", {"y": "yes", "n": "no"}, "n") == "n":
            chat.front.note("not saved")
            return
    write(path, chat.name, chat.conversation.messages)
    chat.written.add(path)
    chat.file = path
    chat.front.note(f"saved to {path}")


def _load(chat: Chat, argument: str) -> None:
    path = _absolute(Path(argument)) if argument else kept_path()
    messages = read(path)
    chat.conversation = Conversation(messages)
    chat.file = path if argument else chat.file
    chat.resume()


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{path} can't be used: {error}") from error


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = "" if argument == "off" else argument
    text = chat.conversation.system
    chat.front.say(f"system message: {text}" if text else "there is no system message; /system TEXT sets one")


def _regen(chat: Chat, argument: str) -> None:
    if not chat.conversation.turns:
        raise ConfigError("there is nothing to answer again yet")
    if chat.sampling.greedy or chat.sampling.seeded:
        why = "temperature 0" if chat.sampling.greedy else "a --seed"
        chat.front.note(
            f"with {why} the answer stays the same{'; /temp 0.8 varies it' if chat.sampling.greedy else ''}"
        )
    chat.again()


def _edit(chat: Chat, argument: str) -> None:
    if not chat.conversation.turns:
        raise ConfigError("there is no message to edit yet")
    if argument:
        chat.again(argument)
    elif not chat.front.interactive:
        raise ConfigError("without a terminal /edit needs the new text: /edit TEXT")
    else:
        chat.prefill = typed_as(chat.conversation.take_back() or "")


def _undo(chat: Chat, argument: str) -> None:
    text = chat.conversation.take_back()
    if text is None:
        raise ConfigError("there is nothing to undo")
    chat.front.note(f"dropped with its answer: {shortened(text)}")


def _stats(chat: Chat, argument: str) -> None:
    totals = chat.totals
    if totals.last is None:
        raise ConfigError("there are no figures before the first answer")
    lines = [f"last answer: {chat.describe(totals.last)}"]
    if totals.answers > 1:
        lines.append(f"{totals.answers} answers: {chat.describe(totals.all)}")
    if why := totals.last.disabled_reason:
        lines.append(f"nothing is drafted: {why}")
    chat.front.say("\n".join(lines))


def _draft(chat: Chat, argument: str) -> None:
    if argument.isascii() and argument.isdigit():
        chat.set_draft(max_nodes=int(argument))
    elif argument:
        chat.set_draft(draft=argument, max_nodes=None)
    draft = chat.draft
    what = "are decoded plainly" if draft.nodes == 1 else f"draft up to {draft.nodes} nodes with {draft.draft}"
    chat.front.say(f"the next answers {what} (/draft NODES, or one of {', '.join(DRAFTERS)})")


def _corpus(chat: Chat, argument: str) -> None:
    if argument not in ("", "off") and chat.draft.draft != "racer":
        raise ConfigError(f"the {chat.draft.draft} drafter reads no indexes; /draft racer first")
    if argument:
        chat.set_draft(corpora=[] if argument == "off" else [str(_absolute(Path(argument)))])
    used = ", ".join(chat.draft.corpora)
    chat.front.say(f"drafts from {used}" if used else "no index drafts; /corpus FILE uses one")


def _temp(chat: Chat, argument: str) -> None:
    if argument:
        try:
            chat.set_temperature(float(argument))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"temperature is {shortened(argument)!r}; it must be a number, such as 0.8") from error
    chat.front.say(f"temperature {chat.sampling.temperature:g}{' (greedy)' if chat.sampling.greedy else ''}")


def _tint(chat: Chat, argument: str) -> None:
    if argument not in ("", "on", "off"):
        raise ConfigError("/tint is followed by on or off")
    chat.tint = argument == "on" if argument else not chat.tint
    if chat.tint:
        chat.front.legend()
    else:
        chat.front.note("tint is off")


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    chat.front.clear()
    chat.front.note("a new chat; /load without a FILE brings the old one back")


def _quit(chat: Chat, argument: str) -> None:
    chat.done = True


_ALL = (
    Command("help", "", "this list", _help),
    Command("save", "[FILE]", "keep the chat in a file", _save, files=True),
    Command(
        "load", "[FILE]", "go on with a chat from a file; without one, the last that was answered", _load, files=True
    ),
    Command("system", "[TEXT|off]", "show, set or drop the system message", _system, choices=("off",)),
    Command("regen", "", "answer the last message again", _regen),
    Command("edit", "[TEXT]", "change the last message and answer it again", _edit),
    Command("undo", "", "drop the last message and its answer", _undo),
    Command("stats", "", "speed and drafts of the last answer and of all", _stats),
    Command(
        "draft", "[NAME|NODES]", "what drafts the next answers; none is plain decoding", _draft, choices=tuple(DRAFTERS)
    ),
    Command("corpus", "[FILE|off]", "draft from an index of your own files", _corpus, files=True, choices=("off",)),
    Command("temp", "[T]", "temperature of the next answers; 0 is greedy", _temp),
    Command(
        "tint", "[on|off]", "colour what was drafted by its source, without Markdown", _tint, choices=("on", "off")
    ),
    Command("clear", "", "begin a new chat; the system message stays", _clear),
    Command("quit", "", "leave (Ctrl-D)", _quit),
)
COMMANDS = {command.name: command for command in _ALL}
