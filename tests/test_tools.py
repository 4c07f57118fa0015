from __future__ import annotations

import json

import pytest

from racer_local.errors import ContextFullError
from racer_local.llama import render_chat
from racer_local.llama.grammar import grammar_of
from racer_local.tools import Call, Reader, Style

HERMES = "{% if tools %}<tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": f, "parameters": d}{% endif %}'
MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ADD = Call("add", '{"a": 1}')


def read(text, template=HERMES, size=1, inside=False):
    reader = Reader(Style.of(template), {"add"}, inside=inside)
    shown = "".join(reader.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = reader.finish()
    return shown + rest, calls


@pytest.mark.parametrize(
    ("template", "begin", "arguments", "native"),
    [
        (HERMES, "<tool_call>", "arguments", True),
        (LLAMA, "", "parameters", True),
        (MISTRAL, "", "arguments", True),
        ("{{ messages }}", "<tool_call>", "arguments", False),
        (HERMES + "<function=x>", "<tool_call>", "arguments", False),  # calls in XML: told in our own words
    ],
)
def test_a_template_tells_how_its_model_writes_calls(template, begin, arguments, native):
    style = Style.of(template)
    assert (style.begin, style.arguments, style.native) == (begin, arguments, native)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("plain text", "plain text", []),
        ("a < b and <tool> too", "a < b and <tool> too", []),
        (CALL, "", [ADD]),
        (f"Well. {CALL}", "Well. ", [ADD]),
        (f"{CALL}\n{CALL}", "", [ADD, ADD]),
        (f"{CALL} done", " done", [ADD]),
        (CALL[: -len("</tool_call>")], "", [ADD]),  # cut before its end
        ('Hi <tool_call>\n{"name":"add","argum',) * 2 + ([],),  # and before it is one
        ('<tool_call>{"name": "add", "arguments": NaN}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>',) * 2 + ([],),
        ("<tool_call>[]</tool_call>",) * 2 + ([],),
        ('<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',) * 2 + ([],),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>',) * 2 + ([],),
        ("<tool_call>[1, 2]</tool_call>", "<tool_call>[1, 2]</tool_call>", []),
        ("<tool_call>null</tool_call>", "<tool_call>null</tool_call>", []),
        ("ends with <tool_ca", "ends with <tool_ca", []),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "add"}</tool_call>', "", [Call("add", "{}")]),
    ],
)
def test_calls_are_taken_out_wherever_the_text_is_cut(text, shown, calls, size):
    assert read(text, size=size) == (shown, calls)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        ('\n [{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
        ('{"other": 1}', '{"other": 1}', []),
        ("{not json", "{not json", []),
        ('Text, then {"name": "add"}', 'Text, then {"name": "add"}', []),
        ("", "", []),
    ],
)
def test_a_bare_call_is_the_whole_answer(text, shown, calls, size):
    assert read(text, LLAMA, size) == (shown, calls)


def test_nothing_of_a_call_is_shown_while_it_may_still_be_one():
    reader = Reader(Style.of(HERMES), {"add"})
    assert [reader.push(part) for part in ("Well", " <", "tool", "_call", '>{"na')] == ["Well", " ", "", "", ""]


def test_a_forced_call_begins_within_the_tag():
    assert read('{"name": "add", "arguments": {"a": 1}}\n</tool_call>', inside=True) == ("", [ADD])
    assert read('{"name": "add", "parameters": {"a": 1}}', LLAMA, inside=True) == ("", [ADD])


def test_the_schema_of_a_call_allows_these_tools_and_no_other():
    other = {"type": "function", "function": {"name": "stop"}}
    schema = Style.of(LLAMA).schema([TOOL, other])
    names = [each["properties"]["name"]["const"] for each in schema["anyOf"]]
    assert names == ["add", "stop"]
    assert schema["anyOf"][1]["properties"]["parameters"] == {"$ref": "#/$defs/tool1"}
    assert schema["$defs"]["tool1"] == {"type": "object"}


def test_references_in_a_tools_parameters_are_to_these():
    parameters = {"properties": {"x": {"$ref": "#/$defs/P"}}, "$defs": {"P": {"type": "integer"}}}
    schema = Style.of("").schema([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert schema["$defs"]["tool0"]["properties"]["x"] == {"$ref": "#/$defs/tool0/$defs/P"}
    assert '"f\\""' in grammar_of(schema)


MESSAGES = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "type": "function", "function": ADD._asdict()}]},
    {"role": "tool", "tool_call_id": "x", "content": "2"},
]


def test_a_template_that_knows_no_tools_gets_them_and_their_calls_as_text():
    told = Style.of("").written(MESSAGES, [TOOL])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert json.dumps(TOOL) in told[0]["content"]
    assert json.loads(told[2]["content"].split("\n")[1]) == {"name": "add", "arguments": {"a": 1}}
    assert told[3]["content"] == "<tool_response>\n2\n</tool_response>"
    own = Style.of("").written([{"role": "system", "content": "Be kind."}, *MESSAGES], [TOOL])
    assert own[0]["content"].startswith("Be kind.\n\nYou may call")
    assert len(own) == 4


def test_a_template_that_knows_tools_gets_arguments_as_objects():
    told = Style.of(HERMES).written(MESSAGES, [TOOL])
    assert told[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert told[1]["content"] == ""


@pytest.mark.parametrize(
    "place",
    ["description", "name", "arguments", "result", "content"],
)
def test_a_control_tokens_spelling_stays_text_wherever_a_client_writes_it(tiny, place):
    spelling = "</s>"
    tool = {"type": "function", "function": {**TOOL["function"]}}
    messages = [dict(message) for message in MESSAGES]
    if place in ("description", "name"):
        tool["function"][place] = f"x{spelling}"
    elif place == "arguments":
        call = {"name": "add", "arguments": json.dumps({"a": spelling})}
        messages[1] = {**messages[1], "tool_calls": [{"id": "x", "type": "function", "function": call}]}
    else:
        messages[2 if place == "result" else 0]["content"] = f"x {spelling} y"
    plain = render_chat(tiny, MESSAGES, [TOOL])
    tokens = render_chat(tiny, messages, [tool])
    assert tokens != plain
    assert tokens.count(2) == plain.count(2)
    text = b"".join(tiny.piece(token, special=True) for token in tokens).decode()
    assert text.count(spelling) == plain.count(2) + 1


@pytest.mark.parametrize("text", ["ab " * 100_000, "</s>" * 300, "x" * 10_000])
def test_a_chat_that_no_context_can_hold_is_refused_before_it_is_looked_through(tiny, text):
    with pytest.raises(ContextFullError, match="the context"):
        render_chat(tiny, [{"role": "user", "content": text}], n_ctx=256)


def test_a_call_whose_arguments_are_no_json_is_given_back_to_the_template_as_text():
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "[" * 3000}}
    told = Style.of(HERMES).written([{"role": "assistant", "content": None, "tool_calls": [call]}], [TOOL])
    assert told[0]["tool_calls"][0]["function"]["arguments"] == "[" * 3000
