"""The loop: read a line, answer it or do what it says, keep the chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from racer_local.chat.conversation import Conversation, kept_path, write
from racer_local.chat.front import Front, stoppable
from racer_local.chat.texts import Call, parse, shortened, typed_as
from racer_local.config import SamplingConfig
from racer_local.errors import ConfigError, RacerError
from racer_local.llama import render_chat
from racer_local.session import Session
from racer_local.stats import GenerationStats
from racer_local.target import never

LEAST_RESERVE = 64
"""Tokens that must be left for an answer, at least, or the chat makes room first."""
SUMMARY_TOKENS = 256
"""Length of a summary, at most."""
SUMMARISE = (
    "Summarise our conversation so far in a few sentences, with the facts, names and decisions that matter for what "
    "comes next. Write nothing but the summary."
)
CHOICES = {"d": "drop the oldest turns", "s": "summarise them", "c": "cancel"}


@dataclass
class Totals:
    """Figures of the last answer, and of all."""

    last: GenerationStats | None = None
    all: GenerationStats = field(default_factory=GenerationStats)
    answers: int = 0

    def take(self, stats: GenerationStats) -> None:
        self.last = stats
        self.all.add(stats)
        self.answers += 1
        drafters = {name: None for name in [*self.all.draft.split("+"), stats.draft] if name}
        self.all.draft = "+".join(drafters)


class Chat:
    """A conversation with the model of one session, which stays open for it: cache and drafter carry over.

    `describe` puts the figures of an answer into a line.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        front: Front,
        *,
        sampling: SamplingConfig,
        describe: Callable[[GenerationStats], str],
        max_tokens: int | None = None,
        messages: Sequence[dict[str, str]] = (),
    ) -> None:
        self.session, self.name, self.front = session, name, front
        self.sampling, self.describe, self.max_tokens = sampling, describe, max_tokens
        self.conversation = Conversation(messages)
        self.racer: dict[str, Any] = {}
        """What of the session's draft settings the next answers change."""
        self.draft = session.for_answer(None)
        self.tint = False
        self.prefill = ""
        """What the input line begins with."""
        self.problem = ""
        """Why a message is back in the input line."""
        self.done = False
        self.totals = Totals()
        self.stopped: Callable[[], bool] = never
        self.file: Path | None = None
        """The file that was saved to or loaded from last."""
        self.written: set[Path] = set()
        """Files that this chat wrote."""
        self._kept = list(messages)
        self._keeps = True

    @property
    def n_ctx(self) -> int:
        return self.session.target.n_ctx

    @property
    def reserve(self) -> int:
        """Tokens that a prompt must leave for its answer."""
        return min(max(LEAST_RESERVE, self.n_ctx // 16), self.n_ctx // 2)

    def run(self) -> int:
        """Until the user quits or the input ends; the exit code.

        Raises KeyboardInterrupt for Ctrl-C where nobody is there to go on.
        """
        # Between answers too Ctrl-C ends nothing where somebody sits there; the input line sees it as a key.
        with stoppable() if self.front.interactive else nullcontext():
            self._greet()
            while not self.done:
                try:
                    text = self.front.read(self.prefill, self.status())
                except EOFError:
                    break
                except KeyboardInterrupt:
                    if not self.front.interactive:
                        raise
                    self.front.note("Ctrl-D or /quit ends the chat")
                    continue
                self.prefill = self.problem = ""
                with stoppable() as self.stopped:
                    self._turn(text)
                    stopped = self.stopped()
                if stopped and not self.front.interactive:
                    raise KeyboardInterrupt
        return 0

    def _turn(self, text: str) -> None:
        """Nothing that goes wrong here ends the chat."""
        if not text.strip():
            return
        try:
            typed = parse(text)
            if isinstance(typed, Call):
                from racer_local.chat.commands import call

                call(self, typed, text)
            elif typed.text.strip():
                self.ask(typed.text)
        except RacerError as error:
            self._fail(str(error))
        except BrokenPipeError:
            raise
        except Exception as error:  # a chat of hours is worth more than where in the code it was
            self._give_back()
            self._fail(f"{type(error).__name__}: {shortened(str(error), 200)}")
        self.keep()

    def _fail(self, problem: str) -> None:
        self.front.error(problem)
        self.problem = problem

    def ask(self, text: str) -> None:
        """Answer a message; where that fails its text is back in the input line."""
        self.conversation.ask(text)
        try:
            answered = self.answer()
        except RacerError:
            self._give_back()
            raise
        if not answered:
            self._give_back()

    def again(self, text: str | None = None) -> None:
        """Answer the last message anew, with another text if one is given; where that fails all stays as it was."""
        before = list(self.conversation.messages)
        self.conversation.drop_answer()
        if text is not None:
            self.conversation.take_back()
            self.conversation.ask(text)
        answered = False
        try:
            answered = self.answer()
        finally:
            if not answered:
                self.conversation.messages = before

    def _give_back(self) -> None:
        if self.conversation.awaits:
            self.prefill = typed_as(self.conversation.take_back() or "")

    def answer(self) -> bool:
        """Answer the last message; False where that was cancelled before there was any text.

        Raises RacerError where there is none for another reason.
        """
        if not self._make_room():
            return False
        self.keep()
        stats, parts = GenerationStats(), []
        failed = None
        try:
            with (
                self.front.answer(self.tint) as show,
                closing(
                    self.session.stream(
                        self.conversation.messages,
                        sampling=self.sampling,
                        max_tokens=self.max_tokens,
                        draft=self.draft,
                        stats=stats,
                        cancelled=self.stopped,
                    )
                ) as pieces,
            ):
                for piece in pieces:
                    parts.append(piece.text)
                    show(piece)
        except RacerError as error:
            failed = error
        if stats.emitted:
            self.totals.take(stats)
        text = "".join(parts)
        if not text and (failed or stats.finish_reason == "cancelled"):
            if failed:
                raise failed
            self.front.note("stopped before the first word")
            return False
        self.conversation.answered(text)
        self._tell_end(stats, text, failed)
        return True

    def _tell_end(self, stats: GenerationStats, text: str, failed: RacerError | None) -> None:
        """Why the answer is not whole, if it is not."""
        if failed:
            self.front.error(f"{failed}; what came before is kept")
        elif stats.finish_reason == "cancelled":
            self.front.note("stopped; what there is of the answer is kept")
        elif stats.finish_reason == "length" and stats.emitted == self.max_tokens:
            self.front.note(f"the answer was cut at {self.max_tokens} tokens (--max-tokens)")
        elif stats.finish_reason == "length":
            self.front.note(f"the answer was cut: the context of {self.n_ctx} tokens is full (--ctx makes it larger)")
        elif not text:
            self.front.note("the model answered nothing; /regen asks again")

    def prompt_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        return len(render_chat(self.session.model, messages))

    def left(self) -> int:
        """Tokens that the context has left for the next message and its answer."""
        messages = self.conversation.messages
        return max(0, self.n_ctx - (self.prompt_tokens(messages) if self.conversation.turns else 0))

    def status(self) -> list[str]:
        """For the line below the input, the most important first: why a text is back, or how things stand."""
        if self.prefill and self.problem:  # it may be so long that nobody sees what stands above it
            return [self.problem]
        parts = [self.draft.draft]
        if last := self.totals.last:
            parts = [f"{last.tokens_per_second:.1f} tokens/s", f"MAT {last.mean_accepted_tokens:.2f}", *parts]
        try:
            return [f"{self.left()} tokens left", *parts]
        except RacerError:
            return parts

    def _make_room(self) -> bool:
        """Whether the prompt leaves room for an answer, after turns were dropped or summarised if need be.

        Raises ConfigError where the last message alone is too long.
        """
        if self._fits():
            return True
        shortest = Conversation(self.conversation.messages)
        while shortest.drop_oldest():
            pass
        needed = self.prompt_tokens(shortest.messages)
        if self.n_ctx - needed < self.reserve:
            raise ConfigError(
                f"the message takes {needed} tokens with its frame, and of the context's {self.n_ctx} an answer needs "
                f"{self.reserve}; shorten it, or start with a larger --ctx"
            )
        taken = self.prompt_tokens(self.conversation.messages)
        question = f"With {taken} of {self.n_ctx} tokens the context has no room for an answer:"
        choice = self.front.choose(question, CHOICES, "c" if self.front.interactive else "d")
        if choice == "s" and not self._summarise():
            return False
        if choice != "c":
            self._drop()
        return choice != "c"

    def _fits(self) -> bool:
        return self.n_ctx - self.prompt_tokens(self.conversation.messages) >= self.reserve

    def _drop(self) -> None:
        """Until the rest leaves room."""
        dropped = 0
        while not self._fits() and self.conversation.drop_oldest():
            dropped += 1
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.front.note(f"the oldest {turns} dropped; {self.left()} tokens are left")

    def _summarise(self) -> bool:
        """Put a summary by the model in place of the turns before the last message; False where it was stopped."""
        old = Conversation(self.conversation.messages[:-1])
        old.ask(SUMMARISE)
        length = min(SUMMARY_TOKENS, self.reserve)
        while self.n_ctx - self.prompt_tokens(old.messages) < length and old.drop_oldest():
            pass
        self.front.note("summarising what was said so far")
        answer = self.session.answer(old.messages, sampling=SamplingConfig(), max_tokens=length, cancelled=self.stopped)
        if self.stopped():
            return False
        before = list(self.conversation.messages)
        self.conversation.summarise(answer.text)
        if answer.text.strip() and self._takes_it():
            self.front.note(f"summary: {shortened(answer.text, 300)}")
        else:
            self.conversation.messages = before
            self.front.note("the summary is empty or does not fit; turns are dropped instead")
        return True

    def _takes_it(self) -> bool:
        """Whether there is room with the summary, and the chat template knows a system message."""
        try:
            return self._fits()
        except RacerError:
            return False

    def set_draft(self, **changes: Any) -> None:
        """Change what the next answers draft. Raises ConfigError, and changes nothing, where that can't be done."""
        racer = {name: value for name, value in {**self.racer, **changes}.items() if value is not None}
        asked = dict(racer)
        if asked.get("draft", self.draft_at_start) != "racer":
            asked.pop("corpora", None)
        self.draft = self.session.for_answer(asked or None)
        self.racer = racer

    @property
    def draft_at_start(self) -> str:
        return self.session.draft.draft

    def set_temperature(self, temperature: float) -> None:
        self.sampling = replace(self.sampling, temperature=temperature)

    def keep(self) -> None:
        """Keep the chat for --continue, if it has changed. An empty one takes no other's place."""
        messages = self.conversation.messages
        if not self._keeps or messages == self._kept or not self.conversation.turns:
            return
        try:
            kept_path().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write(kept_path(), self.name, messages)
            self._kept = list(messages)
        except (ConfigError, OSError) as error:
            self._keeps = False
            self.front.note(f"this chat is not kept for --continue: {error}")

    def resume(self) -> None:
        """After messages were loaded: show where it goes on."""
        asked = typed_as(self.conversation.take_back() or "") if self.conversation.awaits else ""
        if turns := self.conversation.turns:
            self.front.recall(turns[-2]["content"], turns[-1]["content"])
        count = self.conversation.exchanges
        self.front.note(f"the chat goes on after {count} answer{'' if count == 1 else 's'}")
        if asked and self.front.interactive:
            self.prefill = asked
        elif asked:
            self.front.note(f"its last message has no answer and was left out: {shortened(asked)}")

    def _greet(self) -> None:
        if self.front.interactive:
            self.front.note(f"{self.name}, context {self.n_ctx} tokens; /help lists the commands, Ctrl-D quits")
        if self.conversation.turns:
            self.resume()
