"""Tools that a model may call: how it is told of them, and how its calls are read out of its text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
"""As OpenAI has it: {"type": "function", "function": {"name", "description", "parameters"}}."""

INSTRUCTIONS = """You may call one or more functions to assist with the user query. Their signatures, in JSON:
<tools>
{tools}
</tools>
For each call return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


class Call(NamedTuple):
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True)
class Style:
    """How a model writes a call down: JSON between two tags, or JSON alone."""

    begin: str
    end: str
    arguments: str
    """The key that they have beside "name"."""
    native: bool
    """Whether the chat template tells the model of the tools; else INSTRUCTIONS do."""

    @classmethod
    def of(cls, template: str) -> Style:
        """Told by what a chat template has in it: Hermes and Qwen's tags, Mistral's list, Llama 3's object."""
        if "tools" in template and "<tool_call>" in template and "<function=" not in template:
            return cls("<tool_call>", "</tool_call>", "arguments", native=True)
        if "tools" in template and "[TOOL_CALLS]" in template:
            return cls("", "", "arguments", native=True)
        if "tools" in template and '"parameters"' in template and "<tool_call>" not in template:
            return cls("", "", "parameters", native=True)
        return cls("<tool_call>", "</tool_call>", "arguments", native=False)

    def schema(self, tools: Sequence[Tool]) -> dict[str, Any]:
        """What the JSON of a call to one of these must be."""
        calls, parameters = [], {}
        for number, tool in enumerate(tools):
            place = f"tool{number}"
            parameters[place] = _moved(tool["function"].get("parameters") or {"type": "object"}, f"#/$defs/{place}")
            properties = {"name": {"const": tool["function"]["name"]}, self.arguments: {"$ref": f"#/$defs/{place}"}}
            calls.append({"type": "object", "properties": properties, "required": [*properties]})
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": parameters}

    def written(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """The messages as the chat template takes them, with calls, results and tools in them."""
        written = [_with_objects(message) for message in messages]
        if self.native:
            return written
        texts = [self._as_text(message) for message in written]
        if tools:
            told = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            if texts and texts[0]["role"] == "system":
                texts[0] = {**texts[0], "content": f"{texts[0]['content']}\n\n{told}"}
            else:
                texts.insert(0, {"role": "system", "content": told})
        return texts

    def _as_text(self, message: Message) -> dict[str, Any]:
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        calls = [
            f"{self.begin}\n{json.dumps(call['function'], ensure_ascii=False)}\n{self.end}"
            for call in message.get("tool_calls") or []
        ]
        content = "\n".join(filter(None, [message.get("content") or "", *calls]))
        return {"role": message["role"], "content": content}


class Reader:
    """Takes the calls out of an answer's text as it comes.

    >>> reader = Reader(Style.of(""), {"add"})
    >>> reader.push("Well. <tool"), reader.push('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Well. ', '')
    >>> reader.finish()
    ('', [Call(name='add', arguments='{"a": 1}')])
    """

    def __init__(self, style: Style, names: Collection[str], *, inside: bool = False) -> None:
        """`names`: of the tools; a call to another one stays text. `inside`: the text begins within a call."""
        self._style, self._names, self._inside = style, names, inside
        self._held = ""
        self._calls: list[Call] = []
        self._begun = False
        self._opened = False
        """Whether the tag of the call that is being read stood in the text."""

    def push(self, text: str) -> str:
        """What of the text so far is certainly no call."""
        self._held += text
        if not self._style.begin:
            bare = self._inside or (self._held.lstrip()[:1] in ("{", "[", "") and not self._begun)
            return "" if bare else self._give(len(self._held))
        shown = ""
        while True:
            if self._inside:
                text, end, rest = self._held.partition(self._style.end)
                if not end:
                    return shown
                shown += self._take(text, end)
                self._opened = False
                self._held, self._inside = rest, False
            before, begin, rest = self._held.partition(self._style.begin)
            if not begin:
                return shown + self._give(len(self._held) - self._may_begin())
            shown += "" if self._between_calls(before) else before
            self._held, self._inside, self._opened = rest, True, True

    def finish(self) -> tuple[str, list[Call]]:
        """What is left of the text, and the calls in their order."""
        rest, self._held = self._held, ""
        if rest and (self._inside or not (self._style.begin or self._begun)):
            rest = self._take(rest, "")
        return ("" if self._calls and not rest.strip() else rest), self._calls

    def _give(self, length: int) -> str:
        given = self._held[:length]
        if self._between_calls(given):
            return ""
        self._held = self._held[length:]
        self._begun = self._begun or bool(given.strip())
        return given

    def _between_calls(self, text: str) -> bool:
        return bool(self._calls) and not text.strip()

    def _take(self, text: str, end: str) -> str:
        """Notes the calls in a text; what is none is given back."""
        try:
            found = _parse(text)
            items = found if isinstance(found, list) else [found]
            calls = [self._call(item) for item in items]
        except (ValueError, TypeError, KeyError, RecursionError):
            calls = []
        if not calls:
            return (self._style.begin if self._opened else "") + text + end
        self._calls += calls
        return ""

    def _call(self, item: Mapping[str, Any]) -> Call:
        if item["name"] not in self._names:
            raise KeyError(item["name"])
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _parse(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("arguments are an object")
        told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        told.encode("utf-8")  # half a character can't be sent
        return Call(item["name"], told)

    def _may_begin(self) -> int:
        """Characters at the end that may be the beginning of a tag."""
        tag = self._style.begin
        return next((n for n in range(min(len(tag) - 1, len(self._held)), 0, -1) if tag.startswith(self._held[-n:])), 0)


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root are to `root`."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    return [_moved(value, root) for value in schema] if isinstance(schema, list) else schema


def _parse(text: str) -> Any:
    """JSON, of which NaN and the like are no part. Raises ValueError, RecursionError."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def _with_objects(message: Message) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, which templates write as JSON themselves."""
    written = {**message, "content": message.get("content") or ""}
    if not message.get("tool_calls"):
        return written
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = _parse(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        calls.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return {**written, "tool_calls": calls}
