"""From a JSON schema to the grammar that an answer keeps to, by the binding's converter; refuses what it can't take.

Of numbers only an integer's bounds are kept to; `multipleOf`, `uniqueItems`, `format` of other texts than dates and
uuids, and numbers of properties are not.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from racer_local.errors import ConfigError

if sys.version_info >= (3, 11):
    from re import _parser as pattern_parser
else:
    import sre_parse as pattern_parser

MOST_REPEATS = 1000
"""A count in a schema becomes so many copies of a rule."""
MOST_PATTERN_REPEATS, MOST_QUANTIFIERS, MOST_PATTERN = 64, 16, 256
"""Of a pattern: its counts, its repetitions and its characters. What may be left out many times in a row makes the
grammar's alternatives multiply."""
MOST_DEPTH = 32
MOST_GRAMMAR = 1 << 18
"""Characters."""
MOST_DIGITS = 15
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
"""A literal or a class of characters in a grammar."""
NO_JSON = r'"\\\x7F\x00-\x1F'
"""What must be escaped in a text; the converter lets it through wherever all but some characters are allowed."""
ESCAPED = {*range(0x20), ord('"'), ord("\\"), 0x7F}
"""The same, as code points."""
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
        text.encode("utf-8")
    except RecursionError:
        raise ConfigError("the JSON schema is too large, or refers to itself without an end; make it smaller") from None
    except Exception as error:  # the converter raises whatever it comes across
        raise ConfigError(f"the JSON schema can't be made a grammar ({_line(error)}); make it simpler") from error
    if len(text) > MOST_GRAMMAR:
        raise ConfigError(f"the JSON schema makes a grammar of {len(text)} characters; {MOST_GRAMMAR} are allowed")
    return text


def _convert(schema: Any, order: Sequence[str]) -> str:
    """llama_cpp.llama_grammar.json_schema_to_gbnf, with backslashes in names and constants written as they must be, and
    the bounds of integers."""
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):  # type: ignore[misc]
        def _format_literal(self, literal: str) -> str:
            return _literal(literal)

        def _generate_constant_rule(self, value: Any) -> str:
            return _literal(json.dumps(value, ensure_ascii=False))

        def visit(self, schema: Any, name: str) -> str:
            bounds = _bounds(schema)
            if bounds is None:
                return str(super().visit(schema, name))
            return str(self._add_rule(name or "root", f"({integers(*bounds)}) space"))

    places = {name: place for place, name in enumerate(order)}
    converter = Converter(prop_order=places, allow_fetch=False, dotall=False, raw_pattern=False)
    copied = converter.resolve_refs(_without_root_reference(json.loads(json.dumps(schema, allow_nan=False))), "stdin")
    converter.visit(copied, "")
    return str(converter.format_grammar())


def wrapped(grammar: str, before: str, after: str) -> str:
    """A grammar with a text before and behind what it describes."""
    lines = [f"inner{line[4:]}" if line.startswith("root ::=") else line for line in grammar.splitlines()]
    return "\n".join([f"root ::= {_literal(before)} inner {_literal(after)}", *lines]) + "\n"


def integers(low: int | None, high: int | None) -> str:
    """What a grammar writes for the whole numbers from `low` to `high`; None: without an end.

    >>> integers(8, 12)
    '[8-9] | "1" ([0-2])'
    >>> integers(None, -5)
    '"-" ([5-9] | [1-9] [0-9]{1,14})'
    """
    if low is not None and high is not None and low > high:
        raise ConfigError(f"no whole number is from {low} to {high}")
    parts = []
    if low is None or low < 0:
        most = None if low is None else -low
        parts.append(f'"-" ({_magnitudes(1 if high is None or high >= 0 else -high, most)})')
    if high is None or high >= 0:
        parts.append(_magnitudes(max(0, low or 0), high))
    return " | ".join(parts)


def _magnitudes(low: int, high: int | None) -> str:
    """Digits of the numbers from `low`, which is 0 or more, to `high`."""
    parts = []
    last = len(str(low)) if high is None else len(str(high))
    for length in range(len(str(low)), last + 1):
        first = str(max(low, 10 ** (length - 1) if length > 1 else 0))
        parts.append(_digits(first, "9" * length if high is None or length < last else str(high)))
    if high is None and last < MOST_DIGITS:
        parts.append(f"[1-9] [0-9]{{{last},{MOST_DIGITS - 1}}}")
    return " | ".join(parts)


def _digits(low: str, high: str) -> str:
    """Digits of the numbers between two of the same length."""
    rest = len(low) - 1
    if low[0] == high[0]:
        return f'"{low[0]}" ({_digits(low[1:], high[1:])})' if rest else f'"{low}"'
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(f'"{low[0]}" ({_digits(low[1:], "9" * rest)})')
        first += 1
    behind = []
    if high[1:] != "9" * rest:
        behind.append(f'"{high[0]}" ({_digits("0" * rest, high[1:])})')
        last -= 1
    middle = [f"[{first}-{last}]" + (f" [0-9]{{{rest}}}" if rest else "")] if first <= last else []
    return " | ".join([*parts, *middle, *behind])


def _bounds(schema: Any) -> tuple[int | None, int | None] | None:
    """An integer's, if it has any: {"type": "integer", "minimum": 1} has (1, None)."""
    if not isinstance(schema, Mapping) or schema.get("type") != "integer" or {"enum", "const"} & schema.keys():
        return None
    names = {"minimum": 0, "exclusiveMinimum": 1, "maximum": 0, "exclusiveMaximum": -1}
    found = {name: int(schema[name] // 1) + off for name, off in names.items() if _is_number(schema.get(name))}
    lows = [found[name] for name in ("minimum", "exclusiveMinimum") if name in found]
    if "minimum" in found and schema["minimum"] > found["minimum"]:
        lows.append(found["minimum"] + 1)  # it is no whole number
    highs = [found[name] for name in ("maximum", "exclusiveMaximum") if name in found]
    return (max(lows, default=None), min(highs, default=None)) if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 10**MOST_DIGITS


def _without_root_reference(schema: Any) -> Any:
    """A schema that is a reference to a definition of its own, as that definition."""
    for _ in range(MOST_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        kind, _, name = (reference or "").removeprefix("#/").partition("/")
        found = schema.get(kind, {}).get(name) if kind in ("$defs", "definitions") else None
        if not isinstance(found, dict):
            return schema
        schema = {**found, kind: schema[kind]}
    return schema


def _look_through(schema: Any, names: dict[str, None], depth: int) -> None:
    """Notes the names of properties in their order, and refuses what would take all memory or time."""
    if depth > MOST_DEPTH:
        raise ConfigError(f"the JSON schema is nested more than {MOST_DEPTH} deep; make it flatter")
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in COUNTS and isinstance(value, (int, float)) and not 0 <= value <= MOST_REPEATS:
                raise ConfigError(f"{key} is {value} in the JSON schema; it must be from 0 to {MOST_REPEATS}")
            if key == "pattern" and isinstance(value, str):
                _check_pattern(value)
            if key == "properties" and isinstance(value, Mapping):
                names.update(dict.fromkeys(map(str, value)))
            _look_through(value, names, depth + 1)
    elif isinstance(schema, Sequence) and not isinstance(schema, str):
        for value in schema:
            _look_through(value, names, depth + 1)


def _check_pattern(pattern: str) -> None:
    """Raises ConfigError for one that matches what a JSON text must escape, or whose grammar takes for ever."""
    if len(pattern) > MOST_PATTERN:
        raise ConfigError(f"a pattern of the JSON schema has {len(pattern)} characters; {MOST_PATTERN} are allowed")
    try:
        parts = [*_parts(pattern_parser.parse(pattern))]
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"the pattern {pattern!r} can't be read ({_line(error)}); correct it") from error
    repeats = [counts for name, counts in parts if name.endswith("_REPEAT")]
    largest = max((most if most != pattern_parser.MAXREPEAT else least for least, most, *_ in repeats), default=0)
    if len(repeats) > MOST_QUANTIFIERS or largest > MOST_PATTERN_REPEATS:
        raise ConfigError(
            f"the pattern {pattern[:40]!r} repeats too much; {MOST_QUANTIFIERS} repetitions of up to "
            f"{MOST_PATTERN_REPEATS} are allowed"
        )
    for name, value in parts:
        span = {"LITERAL": lambda v: range(v, v + 1), "RANGE": lambda v: range(v[0], v[1] + 1)}.get(name)
        if span and any(code in ESCAPED for code in span(value)):
            raise ConfigError(
                f"the pattern {pattern!r} matches a quote, a backslash or a control character, which a JSON text "
                f"must escape; leave them out of it"
            )


def _parts(parsed: Any) -> Iterator[tuple[str, Any]]:
    """What a parsed pattern consists of, but for what is in a class of all-but characters."""
    for operation, value in parsed:
        name = str(operation)
        if name == "IN" and str(value[0][0]) == "NEGATE":
            continue
        yield name, value
        if name == "IN":
            yield from _parts(value)
        elif name.endswith("_REPEAT"):
            yield from _parts(value[2])
        elif name == "SUBPATTERN":
            yield from _parts(value[3])
        elif name == "BRANCH":
            for branch in value[1]:
                yield from _parts(branch)


def _keep_out(token: re.Match[str]) -> str:
    """All-but classes without what no JSON text holds."""
    return f"[^{NO_JSON}{token[0][2:]}" if token[0].startswith("[^") else token[0]


def _literal(text: str) -> str:
    """As a grammar writes a text; its escapes are C's."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
