"""The chat on a real terminal: tmux types and reads the screen."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time

import pytest
from chats import write_endless_gguf

from racer_local.chat.render import WAITING

pytestmark = pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed (apt install tmux)")

ENOUGH = 20
"""Seconds that anything may take."""


@pytest.fixture(scope="module")
def endless_path(tmp_path_factory):
    return write_endless_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


class Tmux:
    """One window in which the chat runs."""

    def __init__(self, folder, model, columns=80):
        self.folder, self.model, self.columns, self.started = folder, model, columns, False
        self.home = folder / "home"
        self.socket = f"racer-chat-{os.getpid()}-{abs(hash(folder))}"

    def tmux(self, *args, **more):
        return subprocess.run(["tmux", "-L", self.socket, "-f", "/dev/null", *args], text=True, **more)

    def launch(self, line):
        """Runs a line of a shell in place of what ran before."""
        if not self.started:
            size = ["-x", str(self.columns), "-y", "24"]
            self.tmux("new-session", "-d", *size, "sh", env=os.environ | {"TERM": "xterm-256color"}, check=True)
            self.tmux("set-option", "-g", "history-limit", "20000")
            self.started = True
        (self.folder / "go").write_text(f"{line}\necho ended with $?\n")
        self.tmux("respawn-pane", "-k", f"sh {self.folder / 'go'}; exec sleep 1000", check=True)

    def start(self, *args, env=()):
        """Starts the chat, and waits for its input line."""
        variables = {"RACER_LOCAL_HOME": self.home, "RACER_LOCAL_SKIP_PROBE": "1", "LC_ALL": "C.UTF-8", **dict(env)}
        chat = [sys.executable, "-m", "racer_local", "chat", "-m", self.model, "--threads", "1", *args]
        self.launch(
            shlex.join(
                ["env", "-u", "NO_COLOR", *(f"{name}={value}" for name, value in variables.items()), *map(str, chat)]
            )
        )
        self.prompt()

    def keys(self, *keys):
        self.tmux("send-keys", *keys, check=True)

    def type(self, text):
        self.tmux("send-keys", "-l", text, check=True)
        self.keys("Enter")

    def screen(self, *, everything=False):
        args = ["-S", "-20000", "-J"] if everything else []
        return self.tmux("capture-pane", "-p", *args, capture_output=True, check=True).stdout

    def wait(self, condition, what):
        end = time.monotonic() + ENOUGH
        while not condition():
            assert time.monotonic() < end, f"waited for {what}:\n{self.screen()}"
            time.sleep(0.03)

    def see(self, text):
        self.wait(lambda: text in self.screen(), f"{text!r} on the screen")

    def prompt(self):
        """Waits for an input line: the status stands below it then, and nothing on it."""
        self.see("tokens left")

    def answering(self):
        """Waits until there are words of an answer: the status line is gone then, and so is the mark in their place."""
        self.wait(lambda: len(self.kept() or []) % 2, "a message that is being answered")
        self.wait(lambda: not any(mark in self.screen() for mark in ("tokens left", WAITING)), "an answer's words")

    def answered(self, count):
        self.wait(lambda: len(self.kept() or []) == 2 * count, f"{count} answers")
        self.prompt()

    def kept(self):
        try:
            return json.loads((self.home / "chats" / "last.json").read_text(encoding="utf-8"))["messages"]
        except FileNotFoundError:
            return None


@pytest.fixture
def terminal(tmp_path, endless_path):
    opened = []

    def open_(model=endless_path, columns=80):
        opened.append(Tmux(tmp_path, model, columns))
        return opened[-1]

    yield open_
    for tmux in opened:
        tmux.tmux("kill-server", capture_output=True)


def texts(messages, role):
    return [message["content"] for message in messages if message["role"] == role]


def test_a_message_is_answered_and_the_prompt_comes_back_until_ctrl_d(terminal):
    chat = terminal()
    chat.start("--max-tokens", "20")
    chat.type("Hello there")
    chat.answered(1)
    assert "tokens/s · MAT" in chat.screen()
    assert texts(chat.kept(), "user") == ["Hello there"]
    assert (chat.home / "chat_history").stat().st_mode & 0o777 == 0o600
    chat.keys("C-d")
    chat.see("ended with 0")
    assert "Traceback" not in chat.screen(everything=True)


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on_also_after_it_is_killed(terminal):
    chat = terminal()
    chat.start("--ctx", "20000")
    chat.type("Hello")
    chat.answering()
    chat.keys("C-c", "C-c")
    chat.see("stopped; what there is of the answer is kept")
    chat.answered(1)
    chat.type("And now?")
    chat.answering()
    chat.keys("C-c")
    chat.answered(2)
    chat.keys("a", "b", "C-c")
    chat.type("/stats")
    chat.see("2 answers: ")
    chat.keys("C-c")
    chat.see("Ctrl-D or /quit ends the chat")
    assert texts(chat.kept(), "user") == ["Hello", "And now?"]
    assert all(texts(chat.kept(), "assistant"))
    before = chat.kept()
    chat.start("--ctx", "20000", "--continue")  # the pane's old process is killed
    chat.see("the chat goes on after 2 answers")
    assert chat.kept() == before
    assert "> And now?" in chat.screen(everything=True)
    assert "Traceback" not in chat.screen(everything=True)


def test_a_message_comes_back_for_editing_and_replaces_the_old_one(terminal):
    chat = terminal()
    chat.start("--max-tokens", "10")
    chat.type("Hello wrld")
    chat.answered(1)
    chat.type("/edit")
    chat.wait(lambda: chat.screen().count("> Hello wrld") == 2, "the message in the input line")
    chat.keys("BSpace", "BSpace", "BSpace")
    chat.type("orld")
    chat.wait(lambda: texts(chat.kept(), "user") == ["Hello world"], "the edited message")
    chat.answered(1)


def test_lines_are_joined_by_a_backslash_by_alt_enter_and_by_quotes(terminal):
    chat = terminal()
    chat.start("--max-tokens", "3")
    chat.type("one\\")
    chat.type("two")
    chat.answered(1)
    chat.keys("a", "M-Enter", "b", "Enter")
    chat.answered(2)
    chat.type('"""')
    chat.type("/x")
    chat.type('"""')
    chat.answered(3)
    assert texts(chat.kept(), "user") == ["one\ntwo", "a\nb", "/x"]


def test_a_paste_of_200_lines_is_one_message(terminal, tmp_path):
    chat = terminal()
    chat.start("--max-tokens", "3", "--ctx", "8192")
    pasted = "\n".join(f"line {number}" for number in range(200))
    (tmp_path / "paste").write_text(pasted)
    chat.tmux("load-buffer", tmp_path / "paste", check=True)
    chat.tmux("paste-buffer", "-p", check=True)
    chat.see("line 199")
    chat.keys("Enter")
    chat.answered(1)
    assert texts(chat.kept(), "user") == [pasted]


def test_a_narrow_window_that_changes_while_it_answers_does_not_break_the_chat(terminal):
    chat = terminal(columns=20)
    chat.start("--ctx", "8192")
    chat.type("Hello")
    chat.answering()
    for columns, rows in ((60, 10), (12, 24), (20, 5), (100, 30)):
        chat.tmux("resize-window", "-x", str(columns), "-y", str(rows), check=True)
        time.sleep(0.15)
    chat.keys("C-c")
    chat.answered(1)
    chat.type("/undo")
    chat.see("dropped with its answer: Hello")
    assert "Traceback" not in chat.screen(everything=True)


LONG = """
import sys, time
from racer_local.chat.terminal import Terminal
from racer_local.pieces import Piece

items = "".join(f"- item {n}, with words enough to fill more than one row\\n" for n in range(30))
code = "".join(f"line_{n} = {n}\\n" for n in range(30))
text = f"# Title\\n\\n{items}\\n```python\\n{code}```\\n\\n" + "one paragraph " * 100
print("before\\n" * 20)  # tmux keeps the cursor's row and puts what does not fit above it out of reach
with Terminal({}, markdown=True).answer(False) as write:
    for at in range(0, len(text), 8):
        write(Piece(text[at : at + 8], []))
        time.sleep(0.004)
print("all", "said")
time.sleep(1000)
"""


def test_a_long_answer_stands_above_once_also_when_the_window_changes(terminal, tmp_path):
    chat = terminal()
    (tmp_path / "long.py").write_text(LONG)
    chat.launch(f"RACER_LOCAL_HOME={tmp_path} {sys.executable} {tmp_path / 'long.py'}")
    for number, columns, rows in ((8, 45, 24), (20, 100, 30), (28, 60, 20)):
        chat.wait(lambda item=f"item {number}, ": item in chat.screen(everything=True), f"item {number}")
        chat.tmux("resize-window", "-x", str(columns), "-y", str(rows), check=True)
    chat.see("all said")
    everything = chat.screen(everything=True)
    for number in range(30):
        assert everything.count(f"item {number},") == 1
        assert everything.count(f"line_{number} =") == 1
    assert everything.split().count("paragraph") == 100


def test_names_of_commands_and_files_are_completed(terminal, tmp_path):
    chat = terminal()
    chat.start("--max-tokens", "3")
    (tmp_path / "only one.json").write_text('{"messages": [{"role": "user", "content": "unanswered"}]}')
    chat.keys("/", "l", "o")
    chat.see("go on with a chat from a file")
    chat.keys("Tab")
    chat.see("> /load")
    chat.keys("Space")
    chat.tmux("send-keys", "-l", f"{tmp_path}/onl", check=True)
    chat.see("only one.json")
    chat.keys("Tab")
    chat.wait(lambda: "/only one.json" in "".join(line.strip() for line in chat.screen().split("\n")), "the whole name")
    chat.keys("Enter")
    chat.see("> unanswered")


def test_no_color_is_kept_to_and_a_tinted_answer_says_so(terminal):
    chat = terminal()
    chat.start("--max-tokens", "20", env={"NO_COLOR": "1"}.items())
    chat.type("/tint on")
    chat.see("NO_COLOR is set")
    chat.type("Hello")
    chat.answered(1)
    chat.type("/tint off")
    chat.see("tint is off")
    coloured = chat.tmux("capture-pane", "-p", "-e", "-S", "-100", capture_output=True).stdout
    assert "\x1b[3" not in coloured.replace("\x1b[39m", "")


def test_tinted_tokens_have_the_colours_of_the_legend(terminal):
    chat = terminal()
    chat.start("--max-tokens", "200", "--draft", "lookup")
    chat.type("/tint on")
    chat.see("drafted from context logits corpus; the rest is the model's own")
    chat.type("one two one two one two one two one two")
    chat.answered(1)
    chat.type("/stats")
    chat.see("(context ")
    coloured = chat.tmux("capture-pane", "-p", "-e", "-S", "-100", capture_output=True).stdout
    assert coloured.count("\x1b[94m") > 1


def test_what_was_typed_before_is_found_again_in_the_next_chat(terminal):
    chat = terminal()
    chat.start("--max-tokens", "3")
    chat.type("something to find")
    chat.answered(1)
    chat.start("--max-tokens", "3")
    chat.keys("C-r")
    chat.tmux("send-keys", "-l", "to fi", check=True)
    chat.see("something to find")
    chat.keys("Enter", "Enter")
    chat.wait(lambda: "something to find" in texts(chat.kept() or [], "user"), "the message")


def test_a_full_context_is_asked_about(terminal):
    chat = terminal()
    chat.start("--ctx", "256", "--max-tokens", "60")
    chat.type("one " * 20)
    chat.answered(1)
    chat.type("two " * 20)
    chat.see("[d] drop")
    chat.type("d")
    chat.see("the oldest turn was dropped")
    chat.wait(lambda: texts(chat.kept(), "user") == ["two " * 20], "the last message alone")


@pytest.mark.model
def test_a_real_model_answers_in_markdown(terminal, smollm2_path):
    chat = terminal(model=smollm2_path)
    chat.start("--max-tokens", "60")
    chat.type("Write three sentences about a river.")
    chat.answered(1)
    first = texts(chat.kept(), "assistant")[0].split()[:8]
    assert " ".join(first) in " ".join(chat.screen().split())
