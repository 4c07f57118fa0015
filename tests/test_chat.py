"""The chat without a terminal: what is said, done, kept and cut."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest
from chats import write_endless_gguf
from hypothesis import given
from hypothesis import strategies as st

from racer_local.chat.conversation import SUMMARY, Conversation, read, write
from racer_local.chat.plain import Plain
from racer_local.chat.texts import Call, Message, clean, is_open, parse, printable, typed_as
from racer_local.config import ContextConfig, DraftConfig, SamplingConfig
from racer_local.errors import ConfigError, DecodeError
from racer_local.session import Answer
from racer_local.stats import GenerationStats


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACER_LOCAL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RACER_LOCAL_SKIP_PROBE", "1")
    return tmp_path / "home"


def said(*texts):
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


# --- what was typed ---


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("hello", Message("hello")),
        ("/temp 0.8", Call("temp", "0.8")),
        ("/save  a file.json ", Call("save", "a file.json")),
        ("/", Call("", "")),
        ("//etc is a folder", Message("/etc is a folder")),
        ('"""\n/a\nb\n"""', Message("/a\nb")),
        ('"""not closed', Message("not closed")),
        (" /temp", Message(" /temp")),
    ],
)
def test_a_line_is_a_message_or_a_command(text, typed):
    assert parse(text) == typed


@given(st.text(min_size=1).filter(lambda text: not text.endswith(('"', "\n")) and not text.startswith("\n")))
def test_a_message_that_comes_back_for_editing_is_the_same_message_when_it_is_sent(text):
    assert parse(typed_as(text)) == Message(text)


def test_a_block_of_several_lines_is_open_until_its_quotes_are_closed():
    assert is_open('"""')
    assert is_open('"""one\ntwo')
    assert not is_open('"""one"""')
    assert not is_open('""""""')
    assert not is_open("one")


def test_what_could_steer_a_terminal_does_not_reach_it():
    assert printable("a\x1b[31mb\x07\x9b2Jc\r\x7f\x00d\n\te") == "a[31mb2Jcd\n\te"
    assert clean("caf\udce9") == "caf\ufffd"


# --- the messages ---


def test_an_exchange_is_dropped_and_its_text_comes_back():
    chat = Conversation(said("a", "b", "c", "d"))
    assert chat.take_back() == "c"
    assert chat.messages == said("a", "b")
    assert chat.take_back() == "a"
    assert chat.take_back() is None


def test_the_oldest_turns_are_dropped_but_not_the_system_message_nor_the_last():
    system = {"role": "system", "content": "s"}
    chat = Conversation([system, *said("a", "b", "c", "d", "e")])
    assert chat.drop_oldest()
    assert chat.messages == [system, *said("c", "d", "e")]
    assert chat.drop_oldest()
    assert not chat.drop_oldest()
    assert chat.messages == [system, *said("e")]


def test_a_summary_takes_the_turns_place_and_a_second_one_takes_the_firsts():
    chat = Conversation(said("a", "b", "c"))
    chat.system = "be kind"
    chat.summarise(" first \n")
    assert chat.messages == [{"role": "system", "content": f"be kind\n\n{SUMMARY}first"}, *said("c")]
    chat.summarise("second")
    assert chat.messages[0]["content"] == f"be kind\n\n{SUMMARY}second"
    chat.system = "be brief"
    assert chat.messages[0]["content"] == f"be brief\n\n{SUMMARY}second"
    chat.system = ""
    assert chat.messages[0]["content"] == f"{SUMMARY}second"
    chat.clear()
    assert chat.messages == []


@given(st.lists(st.sampled_from(["ask", "answer", "undo", "drop", "system", "clear"]), max_size=30))
def test_user_and_assistant_take_turns_whatever_is_done(steps):
    chat = Conversation()
    for step in steps:
        if step == "ask" and not chat.awaits:
            chat.ask("q")
        elif step == "answer" and chat.awaits:
            chat.answered("a")
        elif step == "undo":
            chat.take_back()
        elif step == "drop":
            chat.drop_oldest()
        elif step == "system":
            chat.system = "s" if not chat.system else ""
        elif step == "clear":
            chat.clear()
        roles = [message["role"] for message in chat.turns]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)]


def test_a_saved_chat_is_openais_json_for_the_user_alone_and_is_read_as_it_was(tmp_path):
    path = tmp_path / "chat.json"
    messages = [{"role": "system", "content": "s"}, *said("ä\n\x1b", "🌊 \ufffd")]
    write(path, "tiny", messages)
    assert json.loads(path.read_text(encoding="utf-8")) == {"model": "tiny", "messages": messages}
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path) == messages
    assert os.listdir(tmp_path) == ["chat.json"]


def test_a_file_that_cannot_be_written_is_named_and_left_as_it_was(tmp_path):
    with pytest.raises(ConfigError, match="can't be written"):
        write(tmp_path / "no folder" / "chat.json", "tiny", [])
    with pytest.raises(ConfigError, match="it is no file"):
        write(tmp_path, "tiny", [])
    path = tmp_path / "chat.json"
    path.write_text("before")
    with pytest.raises(ConfigError, match="can't be written"):
        write(path, "tiny", [{"role": "user", "content": "\udce9"}])
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["chat.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no chat"),
        ("{", "holds no chat"),
        ("[" * 100_000, "holds no chat"),
        ("[]", 'a list of "messages"'),
        ('{"messages": {}}', 'a list of "messages"'),
        ('{"messages": ["hi"]}', 'message 1 must have the "role"'),
        ('{"messages": [{"role": "tool", "content": "x"}]}', 'message 1 must have the "role"'),
        ('{"messages": [{"role": "user", "content": 1}]}', 'message 1 must have a text as its "content"'),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "message 1 is the assistant's"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
            "message 2 is the sys",
        ),
        (b"\xff\xfe\x00", "holds no chat"),
    ],
)
def test_a_file_that_holds_no_chat_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_messages_in_parts_are_read_as_one_text(tmp_path):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert read(tmp_path / "chat.json") == said("one two")


# --- a chat in this process, its terminal a script ---


class Script(Plain):
    """A user who types these lines and answers every question the same way."""

    def __init__(self, lines, *, interactive=False, choice=None):
        self.out, self.notes, self.errors, self.results = io.StringIO(), [], [], []
        stdin = io.BytesIO("\n".join(lines).encode() + b"\n")
        super().__init__(stdin, self.out, say=self.results.append, note=self.notes.append, error=self.errors.append)
        self.interactive, self.choice = interactive, choice
        self.asked, self.prefills, self.statuses = [], [], []

    def read(self, prefill, status):
        self.prefills.append(prefill)
        self.statuses.append(status)
        return super().read(prefill, status)

    def choose(self, question, choices, default):
        self.asked.append(question)
        return self.choice or default

    @property
    def answers(self):
        return self.out.getvalue()


@pytest.fixture(scope="module")
def endless_path(tmp_path_factory):
    return write_endless_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def session(endless_path):
    from racer_local.llama import Model
    from racer_local.session import Session

    with (
        Model(endless_path) as model,
        Session(model, ContextConfig(n_ctx=512, threads=1), DraftConfig(draft="lookup")) as opened,
    ):
        yield opened


@pytest.fixture
def chat(session):
    """Runs a chat over some lines; gives it and its script."""
    from racer_local.chat.chat import Chat

    def run(*lines, messages=(), sampling=None, max_tokens=6, describe=lambda stats: "figures", **script):
        front = Script(lines, **script)
        chat = Chat(
            session,
            "tiny",
            front,
            sampling=sampling or SamplingConfig(),
            describe=describe,
            max_tokens=max_tokens,
            messages=messages,
        )
        assert chat.run() == 0
        return chat, front

    return run


def test_the_chat_holds_what_the_model_said_and_stdout_shows_it(chat, session):
    done, front = chat("Hello", "and you?")
    first = session.answer(said("Hello"), max_tokens=6).text
    assert done.conversation.messages[:2] == said("Hello", first)
    assert [message["role"] for message in done.conversation.messages] == ["user", "assistant"] * 2
    texts = [message["content"] for message in done.conversation.messages[1::2]]
    assert front.answers == "".join(printable(text) + "\n" for text in texts)


def test_an_unknown_command_names_the_nearest_and_its_text_comes_back(chat):
    _, front = chat("/regn", "/stat", "/usr/bin/x is what?", "/")
    assert "did you mean /regen?" in front.errors[0]
    assert "did you mean /stats?" in front.errors[1]
    assert front.prefills[1:4] == ["/regn", "/stat", "/usr/bin/x is what?"]
    assert all("\n" not in error for error in front.errors)


def test_help_lists_every_command(chat):
    from racer_local.chat.commands import COMMANDS

    _, front = chat("/help")
    for command in COMMANDS.values():
        assert command.usage in front.results[0]


def test_nothing_is_done_where_there_is_nothing_to_do(chat):
    done, front = chat("/regen", "/edit", "/undo", "/stats", "/edit x", "/quit now")
    assert len(front.errors) == 6
    assert done.conversation.messages == []


def test_a_message_is_edited_undone_and_answered_again(chat):
    done, front = chat("one", "two", "/edit three", "/undo", "/regen")
    assert [message["content"] for message in done.conversation.messages[::2]] == ["one"]
    assert front.answers.count("\n") == 4
    _, front = chat("one", "/edit", interactive=True)
    assert front.prefills[-1] == "one"


def test_an_answer_that_is_asked_for_again_differs_with_a_temperature(chat):
    warm = SamplingConfig(temperature=2.0)
    done, front = chat("one", "/regen", "/regen", sampling=warm, max_tokens=20)
    assert len(set(front.answers.splitlines())) > 1
    assert len(done.conversation.messages) == 2
    assert not any("stays the same" in note for note in front.notes)
    _, front = chat("one", "/regen", "/temp 1.5", "/regen")
    assert sum("stays the same" in note for note in front.notes) == 1
    assert "temperature 1.5" in front.results


def test_settings_are_checked_and_a_wrong_one_changes_nothing(chat):
    done, front = chat("/temp hot", "/temp -1", "/draft fast", "/draft 0", "/draft 200", "/corpus x", "/tint blue")
    assert len(front.errors) == 7
    assert done.sampling == SamplingConfig()
    assert done.draft == done.session.draft
    done, front = chat("/draft none", "hi", "/draft lookup", "/draft 4", "/stats", "hi", "/stats")
    assert done.totals.last.draft == "lookup"
    assert done.totals.all.draft == "none+lookup"
    assert done.draft.nodes == 4
    assert front.results[-1] == "last answer: figures\n2 answers: figures"
    done, _ = chat("/draft 4", "/draft lookup")
    assert done.draft.nodes == 11


def test_a_system_message_is_set_shown_and_dropped(chat):
    done, front = chat("/system", "/system Be kind.", "hi", "/clear", "/system")
    assert done.conversation.messages == [{"role": "system", "content": "Be kind."}]
    assert front.results == ["there is no system message; /system TEXT sets one", *["system message: Be kind."] * 2]
    done, _ = chat("/system off", messages=done.conversation.messages)
    assert done.conversation.messages == []


def test_a_chat_is_saved_and_loaded(chat, tmp_path):
    path = tmp_path / "a chat.json"
    done, front = chat("hi", f"/save {path}", "/undo", f"/load {path}", f"/save {path}")
    assert not front.errors
    assert read(path) == done.conversation.messages
    before = path.read_bytes()
    done, front = chat("other", f"/save {path}", f"/save {tmp_path}", f"/load {tmp_path}/none", messages=said("a", "b"))
    assert "was not written by this chat" in front.errors[0]
    assert len(front.errors) == 3
    assert path.read_bytes() == before
    assert len(done.conversation.messages) == 4
    _, front = chat("other", f"/save {path}", interactive=True)
    assert path.read_bytes() == before
    done, _ = chat("other", f"/save {path}", interactive=True, choice="y")
    assert read(path) == done.conversation.messages


def test_the_running_chat_is_kept_for_the_user_alone(chat, home):
    done, _ = chat("hi", "there")
    kept = home / "chats" / "last.json"
    assert read(kept) == done.conversation.messages
    assert kept.stat().st_mode & 0o777 == 0o600
    chat("/system x", "/clear")
    assert read(kept) == done.conversation.messages
    again, _ = chat("/load")
    assert again.conversation.messages == done.conversation.messages


def test_a_home_that_cannot_be_written_is_noted_once(chat, home):
    home.write_text("a file in its place")
    _, front = chat("hi", "there")
    assert sum("is not kept" in note for note in front.notes) == 1


def test_a_message_that_was_never_answered_comes_back_when_the_chat_goes_on(chat):
    done, front = chat("/help", messages=said("a", "b", "c"), interactive=True)
    assert front.prefills[0] == "c"
    assert done.conversation.messages == said("a", "b")
    _, front = chat(messages=said("a", "b", "c"))
    assert any("was left out: c" in note for note in front.notes)


@contextmanager
def failing(session, monkeypatch, after):
    """The session's answers fail after some pieces."""
    stream = session.stream

    def broken(*args, **kwargs):
        for count, piece in enumerate(stream(*args, **kwargs)):
            if count == after:
                raise DecodeError("llama_decode gave 1")
            yield piece

    with monkeypatch.context() as patch:
        patch.setattr(session, "stream", broken)
        yield


def test_an_error_of_the_model_is_one_line_and_the_text_comes_back(chat, session, monkeypatch):
    with failing(session, monkeypatch, after=0):
        done, front = chat("hi", "/help", interactive=True)
    assert front.errors == ["llama_decode gave 1"]
    assert front.prefills[1] == "hi"
    assert done.conversation.messages == []
    with failing(session, monkeypatch, after=3):
        done, front = chat("hi", max_tokens=20)
    assert len(done.conversation.messages) == 2
    assert "what came before is kept" in front.errors[0]
    with failing(session, monkeypatch, after=0):
        done, front = chat("/regen", "/edit x", messages=said("a", "b"))
    assert done.conversation.messages == said("a", "b")


def test_an_error_nobody_thought_of_does_not_end_the_chat(chat, session, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("by zero\nhere")

    with monkeypatch.context() as patch:
        patch.setattr(session, "stream", broken)
        _, front = chat("hi", "/help")
    assert front.errors == ["ZeroDivisionError: by zero here"]
    assert front.results


# --- a full context ---


def test_in_a_pipe_the_oldest_turns_are_dropped_with_a_note(chat):
    old = said(*[f"{n} " + "word " * 40 for n in range(8)])
    done, front = chat("last", messages=old)
    assert any("oldest" in note and "dropped" in note for note in front.notes)
    assert done.conversation.messages[-2]["content"] == "last"
    assert 2 <= len(done.conversation.messages) < 10
    assert done.n_ctx - done.prompt_tokens(done.conversation.messages[:-1]) >= done.reserve


def test_a_user_is_asked_and_may_cancel_or_have_a_summary(chat):
    old = [{"role": "system", "content": "Be kind."}, *said(*["word " * 50] * 8)]
    done, front = chat("last", "/help", messages=old, interactive=True, choice="c")
    assert done.conversation.messages == old
    assert front.prefills[1] == "last"
    assert "of 512 tokens" in front.asked[0]
    done, front = chat("last", messages=old, interactive=True, choice="s")
    system, *turns = done.conversation.messages
    assert system["content"].startswith(f"Be kind.\n\n{SUMMARY}")
    assert [message["role"] for message in turns] == ["user", "assistant"]
    assert any("summary: " in note for note in front.notes)


@pytest.mark.parametrize("summary", ["  ", "word " * 200])
def test_turns_are_dropped_where_a_summary_is_of_no_use(chat, session, monkeypatch, summary):
    old = said(*["word " * 50] * 8)
    with monkeypatch.context() as patch:
        patch.setattr(session, "answer", lambda *args, **kwargs: Answer(GenerationStats(), summary))
        done, front = chat("last", messages=old, interactive=True, choice="s")
    assert any("turns are dropped instead" in note for note in front.notes)
    assert done.conversation.turns == done.conversation.messages
    assert done.conversation.messages[-2]["content"] == "last"


def test_a_message_that_no_dropping_makes_room_for_says_the_numbers_and_comes_back(chat):
    long = "word " * 300
    done, front = chat(long, "/help", messages=said("a", "b"), interactive=True)
    assert not front.asked
    assert "of the context's 512" in front.errors[0]
    assert front.prefills[1] == long
    assert front.statuses[1] == front.errors  # above so long a text nobody would see it
    assert done.conversation.messages == said("a", "b")


def test_an_answer_that_the_context_or_max_tokens_cut_says_so(chat):
    _, front = chat("hi", max_tokens=None)
    assert any("the context of 512 tokens is full" in note for note in front.notes)
    _, front = chat("hi", max_tokens=3)
    assert any("cut at 3 tokens (--max-tokens)" in note for note in front.notes)


# --- the command, without a terminal ---


def command(path, *args):
    return [sys.executable, "-m", "racer_local", "chat", "-m", str(path), "--threads", "1", "--draft", "lookup", *args]


def test_a_pipe_gets_answers_on_stdout_and_all_else_on_stderr(endless_path, tmp_path):
    typed = b'caf\xe9\n\n/nonsense\n"""\ntwo\nlines\n"""\n' + f"/save {tmp_path}/chat.json\n".encode()
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command(endless_path, "--max-tokens", "8"), input=typed, capture_output=True, env=env)
    assert done.returncode == 0
    messages = read(tmp_path / "chat.json")
    assert [message["content"] for message in messages[::2]] == ["caf\ufffd", "two\nlines"]
    shown = "".join(printable(message["content"]) + "\n" for message in messages[1::2])
    assert done.stdout == shown.encode("ascii", "replace")
    assert b"there is no /nonsense" in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr


def test_ctrl_c_in_a_pipe_ends_the_chat_and_keeps_the_cut_answer(endless_path, home):
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command(endless_path, "--ctx", "100000"), stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=heed
    )
    child.stdin.write(b"hi\n")
    child.stdin.flush()
    child.stdout.read(5)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert b"Traceback" not in err
    assert [message["role"] for message in read(home / "chats" / "last.json")] == ["user", "assistant"]


def test_a_reader_that_goes_away_ends_the_chat_without_a_traceback(endless_path):
    pipe = subprocess.PIPE
    child = subprocess.Popen(command(endless_path, "--ctx", "100000"), stdin=pipe, stdout=pipe, stderr=pipe)
    child.stdin.write(b"hi\n")
    child.stdin.flush()
    child.stdout.read(1)
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait(20) == 1
    assert b"Traceback" not in err
    assert b"Exception" not in err


def test_a_killed_chat_goes_on_with_continue(endless_path, home):
    pipe = subprocess.PIPE
    child = subprocess.Popen(command(endless_path, "--ctx", "100000"), stdin=pipe, stdout=pipe, stderr=pipe)
    child.stdin.write(b"hi\n")
    child.stdin.flush()
    child.stdout.read(5)
    child.kill()
    child.communicate()
    assert read(home / "chats" / "last.json") == said("hi")
    args = command(endless_path, "--continue", "--max-tokens", "4")
    done = subprocess.run(args, input=b"and?\n", capture_output=True)
    assert done.returncode == 0
    assert b"was left out: hi" in done.stderr
    assert [message["role"] for message in read(home / "chats" / "last.json")] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--continue"], b"there is no chat to go on with yet"),
        (["--load", "/no/such/file"], b"can't be read"),
        (["--max-tokens", "0"], b"it must be 1 or more"),
        (["--continue", "--load", "x"], b"not allowed with"),
    ],
)
def test_what_is_wrong_is_said_before_the_model_is_loaded(endless_path, args, message):
    started = time.monotonic()
    done = subprocess.run(command(endless_path, *args), input=b"", capture_output=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert time.monotonic() - started < 10


def test_a_model_without_a_chat_template_is_refused_with_what_to_do(tmp_path, monkeypatch, capsys):
    import tiny_gguf

    from racer_local import cli

    monkeypatch.setattr(tiny_gguf.gguf.GGUFWriter, "add_chat_template", lambda *_: None)
    path = tiny_gguf.write_tiny_gguf(tmp_path / "bare.gguf")
    assert cli.main(["chat", "-m", str(path), "--threads", "1"]) == 2
    assert "racer-local generate --raw" in capsys.readouterr().err


def test_importing_the_command_loads_nothing_heavy():
    code = (
        "import racer_local.cli.chat, sys; print([m for m in ('rich', 'prompt_toolkit', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
