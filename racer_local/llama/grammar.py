"""From a JSON schema to the grammar that an answer keeps to, by the binding's converter; refuses what it can't take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from racer_local.errors import ConfigError

MOST_REPEATS = 1000
"""A count in a schema becomes so many copies of a rule."""
MOST_DEPTH = 32
MOST_GRAMMAR = 1 << 18
"""Characters."""
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
"""A literal or a class of characters in a grammar."""
NO_JSON = r'"\\\x7F\x00-\x1F'
"""What must be escaped in a text; the converter lets it through wherever all but some characters are allowed."""
COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def grammar_of(schema: Mapping[str, Any] | bool) -> str:
    """The GBNF of a JSON schema, its properties in the schema's order.

    Raises ConfigError for a schema that is none, that is too large, or that holds what the converter does not know.
    """
    names: dict[str, None] = {}
    _look_through(schema, names, 0)
    try:
        text = TOKEN.sub(_keep_out, _convert(schema, list(names)))
    except RecursionError:
        raise ConfigError("the JSON schema refers to itself in a way that has no end; give it an end") from None
    except Exception as error:  # the converter raises whatever it comes across
        raise ConfigError(f"the JSON schema can't be made a grammar ({_line(error)}); make it simpler") from error
    if len(text) > MOST_GRAMMAR:
        raise ConfigError(f"the JSON schema makes a grammar of {len(text)} characters; {MOST_GRAMMAR} are allowed")
    return text


def _convert(schema: Any, order: Sequence[str]) -> str:
    """llama_cpp.llama_grammar.json_schema_to_gbnf, with backslashes in names and constants written as they must be."""
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):  # type: ignore[misc]
        def _format_literal(self, literal: str) -> str:
            return _literal(literal)

        def _generate_constant_rule(self, value: Any) -> str:
            return _literal(json.dumps(value, ensure_ascii=False))

    places = {name: place for place, name in enumerate(order)}
    converter = Converter(prop_order=places, allow_fetch=False, dotall=False, raw_pattern=False)
    copied = converter.resolve_refs(json.loads(json.dumps(schema)), "stdin")
    converter.visit(copied, "")
    return str(converter.format_grammar())


def wrapped(grammar: str, before: str, after: str) -> str:
    """A grammar with a text before and behind what it describes."""
    lines = [f"inner{line[4:]}" if line.startswith("root ::=") else line for line in grammar.splitlines()]
    return "\n".join([f"root ::= {_literal(before)} inner {_literal(after)}", *lines]) + "\n"


def _look_through(schema: Any, names: dict[str, None], depth: int) -> None:
    """Notes the names of properties in their order, and refuses what would take all memory."""
    if depth > MOST_DEPTH:
        raise ConfigError(f"the JSON schema is nested more than {MOST_DEPTH} deep; make it flatter")
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in COUNTS and isinstance(value, (int, float)) and not 0 <= value <= MOST_REPEATS:
                raise ConfigError(f"{key} is {value} in the JSON schema; it must be from 0 to {MOST_REPEATS}")
            if key == "pattern" and isinstance(value, str) and ('"' in value or "\\\\" in value):
                raise ConfigError(
                    f"the pattern {value!r} holds what a JSON text must escape; leave out quotes and backslashes"
                )
            if key == "properties" and isinstance(value, Mapping):
                names.update(dict.fromkeys(map(str, value)))
            _look_through(value, names, depth + 1)
    elif isinstance(schema, Sequence) and not isinstance(schema, str):
        for value in schema:
            _look_through(value, names, depth + 1)


def _keep_out(token: re.Match[str]) -> str:
    """All-but classes without what no JSON text holds."""
    return f"[^{NO_JSON}{token[0][2:]}" if token[0].startswith("[^") else token[0]


def _literal(text: str) -> str:
    """As a grammar writes a text; its escapes are C's."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
