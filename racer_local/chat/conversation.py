"""The messages of a chat, how they are changed, and the file that they are kept in."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from racer_local.config import cache_home
from racer_local.errors import ConfigError

SUMMARY = "Summary of the conversation so far:\n"
"""Begins the part of the system message that tells of turns that were dropped, behind the user's own."""
_LARGEST = 64 << 20
"""Bytes of a file that may be a chat."""


def kept_path() -> Path:
    """Where the running chat is kept."""
    return cache_home() / "chats" / "last.json"


class Conversation:
    """A system message or none, then the user's and the model's by turns. While an answer is awaited the last is the
    user's."""

    def __init__(self, messages: Sequence[dict[str, str]] = ()) -> None:
        self.messages = list(messages)

    @property
    def turns(self) -> list[dict[str, str]]:
        """The messages but the system's."""
        return self.messages[self._first :]

    @property
    def exchanges(self) -> int:
        """Answered messages."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def awaits(self) -> bool:
        """Whether the last message is the user's."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    @property
    def _first(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    @property
    def system(self) -> str:
        """The user's own part of the system message."""
        return self._whole_system.partition(SUMMARY)[0].removesuffix("\n\n")

    @system.setter
    def system(self, text: str) -> None:
        _, mark, summary = self._whole_system.partition(SUMMARY)
        self._set_system(text, mark + summary)

    @property
    def _whole_system(self) -> str:
        return self.messages[0]["content"] if self._first else ""

    def _set_system(self, *parts: str) -> None:
        text = "\n\n".join(filter(None, parts))
        self.messages[: self._first] = [{"role": "system", "content": text}] if text else []

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def drop_answer(self) -> str | None:
        """The last answer, no longer part of the chat; None if there is none."""
        return self.messages.pop()["content"] if self.turns and not self.awaits else None

    def take_back(self) -> str | None:
        """The user's last message, which with its answer is no longer part of the chat; None if there is none."""
        self.drop_answer()
        return self.messages.pop()["content"] if self.turns else None

    def drop_oldest(self) -> bool:
        """Drop the oldest exchange, never the user's last message; whether there was one."""
        turns = self.turns
        last = max((at for at, message in enumerate(turns) if message["role"] == "user"), default=0)
        after = next((at for at in range(1, last + 1) if turns[at]["role"] == "user"), 0)
        del self.messages[self._first : self._first + after]
        return after > 0

    def summarise(self, summary: str) -> None:
        """Put a summary in place of all turns but the user's last message."""
        last = self.messages[-1:]
        self._set_system(self.system, SUMMARY + summary.strip())
        self.messages[self._first :] = last

    def clear(self) -> None:
        """Drop all but the user's own system message."""
        system = self.system
        self.messages = []
        self._set_system(system)


def write(path: Path, model: str, messages: Sequence[dict[str, str]]) -> None:
    """Keep a chat, as JSON with OpenAI's messages, readable by the user alone; another program sees all of it or none.

    Raises ConfigError where it can't be written.
    """
    try:
        path = Path(os.path.realpath(path.expanduser()))
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")
        # A temporary file is the user's alone (0600), and keeps its mode when it is renamed.
        with NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as file:
            try:
                json.dump({"model": model, "messages": list(messages)}, file, ensure_ascii=False, indent=1)
                file.write("\n")
                file.close()
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be written ({_reason(error)}); name a file in a folder that is yours"
        ) from error


def read(path: Path) -> list[dict[str, str]]:
    """The messages of a chat that was kept.

    Raises ConfigError for a file that can't be read or holds no chat.
    """
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} can't be read ({_reason(error)})") from error
    if len(data) > _LARGEST:
        raise ConfigError(f"{path} is larger than {_LARGEST >> 20} MiB; that is no chat")
    try:
        return _checked(json.loads(data.decode("utf-8-sig")))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds no chat: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """In one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())


def _checked(chat: Any) -> list[dict[str, str]]:
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list):
        raise ValueError('it must be a JSON object with a list of "messages"')
    found = [_message(number, message) for number, message in enumerate(messages, 1)]
    turns = found[1:] if found and found[0]["role"] == "system" else found
    for at, message in enumerate(turns):
        if message["role"] != ("user", "assistant")[at % 2]:
            number = at + 1 + len(found) - len(turns)
            raise ValueError(
                f"message {number} is the {message['role']}'s; user and assistant must take turns, the user first"
            )
    return found


def _message(number: int, message: Any) -> dict[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if role not in ("system", "user", "assistant"):
        raise ValueError(f'message {number} must have the "role" system, user or assistant')
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise ValueError(f'message {number} must have a text as its "content"')
    return {"role": role, "content": content.encode("utf-8", "replace").decode("utf-8")}
