"""`Llama`: llama_cpp.Llama with drafts. Change the import, and the same calls answer faster."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from racer_local.config import DraftConfig
from racer_local.corpus.shelf import check_indexes
from racer_local.draft.given import GivenDrafts
from racer_local.engine import Emitted
from racer_local.errors import ConfigError, ContextFullError, ModelError
from racer_local.llama import library
from racer_local.llama.chat import mark_control_tokens, tokenize_inside
from racer_local.llama.parent import (
    UNSEEDED,
    CallSampler,
    Parent,
    State,
    can_generate,
    in_the_way,
    lend_model,
    native_tokenizer,
    open_branching,
    prepare,
)
from racer_local.llama.sampler import Candidates
from racer_local.llama.vocabulary import weight_bytes
from racer_local.llm.completion import Call, Completion
from racer_local.llm.turn import Turn
from racer_local.machine import demand_memory
from racer_local.models import readable_size
from racer_local.racing import Racer
from racer_local.stats import GenerationStats
from racer_local.target import Rows
from racer_local.tree import Tokens

RacerSetting = bool | Mapping[str, Any] | DraftConfig | None
NO_DRAFTS = "this Llama was opened for {}, where nothing is drafted"


class _Asked(NamedTuple):
    """What the call in progress asks of one Llama, on its way through the parent's methods."""

    llama: int
    racer: RacerSetting
    corpora: Sequence[str] | None = None
    mark: str = ""


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)


class Llama(Parent):  # type: ignore[misc]
    """llama_cpp.Llama, with a draft tree verified in each forward.

    Every argument, method, dictionary and chunk is the parent's. Two keyword arguments are new, here and in each
    call: `racer` (False: plain decoding; True: the default; or a DraftConfig or a dict of its settings, such as
    {"exact": True}; a call can change draft, max_nodes, exact, corpora and remember) and `corpora`: indexes of your own
    files (racer-local index build) that drafts come from too; those of a call take the place of these.

    What differs from the parent, each time for the better: the default number of threads, log probabilities without
    `logits_all`, a seed that is left out or -1 is another one every time, the stop string that comes first in the text
    ends it, and text, log probabilities and usage are cut at the same place. Calls from several threads queue.
    """

    def __init__(
        self, model_path: str, *, racer: RacerSetting = True, corpora: Sequence[str] | None = None, **arguments: Any
    ) -> None:
        """See llama_cpp.Llama for `arguments`.

        Raises ConfigError for a value that would end the process or that `racer` does not know, ExactnessError
        where an argument stands in the way of exact drafts.
        """
        self._turn = Turn()
        self._racer: Racer | None = None
        self._stats = GenerationStats()
        draft = DraftConfig.of(racer)
        if corpora is not None:
            draft = draft.with_keys({"corpora": corpora})
        check_indexes(draft.corpora)
        draft_model, seed = arguments.pop("draft_model", None), arguments.get("seed")
        prepare(arguments, exact=draft.exact)
        library.show_log(True)
        if not (arguments.get("vocab_only") or library.init().llama_supports_gpu_offload()):
            size = weight_bytes(Path(model_path))
            demand_memory(size, f"{model_path} by itself", "take a smaller quant or model")
        super().__init__(model_path, **arguments)
        self._draft, self.draft_model = draft, draft_model
        self.set_seed(UNSEEDED if seed is None else seed)
        self._candidates_of_row = Candidates(self._n_vocab)
        try:
            self._open(draft)
        except BaseException:
            self.close()
            raise

    def _open(self, draft: DraftConfig) -> None:
        """Make the context one in which trees can be verified, if it is for text."""
        if not can_generate(self):
            self._stats.disabled_reason = NO_DRAFTS.format("its vocabulary or for embeddings")
            if draft.corpora:
                raise ConfigError(f"{self._stats.disabled_reason}; leave out corpora")
            return
        try:
            self._lent = lend_model(self)
        except ModelError as error:
            self._stats.disabled_reason = str(error)
            return
        self._target = target = open_branching(self, self._lent, draft.nodes)
        own = GivenDrafts(self.draft_model, self._lent.end_tokens) if self.draft_model and draft.nodes > 1 else None
        self._racer = Racer(target, draft, self._lent.end_tokens, in_the_way(self), own, self._tell)
        self._tell(
            f"drafting takes {readable_size(self._racer.memory_bytes)} of memory, for logits and what is learned"
        )
        self._stats.disabled_reason = self._racer.disabled_reason
        if self._racer.disabled_reason:
            warnings.warn(f"{self.model_path}: {self._racer.disabled_reason}", RuntimeWarning, stacklevel=3)
        self.input_ids = np.zeros(self._n_ctx, np.intc)
        # Without logits_all nothing is kept there, and the parent's rows are as many as a batch has tokens.
        self.scores = np.zeros((self._n_ctx if self._logits_all else 1, self._n_vocab), np.single)

    @property
    def last_stats(self) -> dict[str, Any]:
        """Statistics of the last call, or of the one in progress."""
        stats = self._stats
        names = ("prompt_tokens", "cached_tokens", "emitted", "finish_reason")
        return {**stats.as_dict(), **{name: getattr(stats, name) for name in names}}

    # --- what the parent generates ---

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
        *,
        racer: RacerSetting = None,
        corpora: Sequence[str] | None = None,
    ) -> Generator[int, Any, None]:
        """Tokens after a prompt, end tokens too, for as long as the caller asks and the context has room.

        What is sent into the generator, guesses for the parent, is not needed: they never change what comes.
        """
        settings = {
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "typical_p": typical_p,
            "temp": temp,
            "repeat_penalty": repeat_penalty,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
            "tfs_z": tfs_z,
            "mirostat_mode": mirostat_mode,
            "mirostat_tau": mirostat_tau,
            "mirostat_eta": mirostat_eta,
            "penalize_nl": penalize_nl,
            "grammar": grammar,
        }
        with self._asking(racer, corpora):
            draft = self._draft_asked_for()
        if draft is None:
            lists = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
            parents: Any = super().generate
            return self._turn.stream(lambda: parents(tokens, reset=reset, **settings, **lists))

        def ids() -> Generator[int, None, None]:
            prompt = list(tokens) if reset else [*self._input_ids.tolist(), *tokens]
            call = Call(prompt, settings, logits_processor or [], stopping_criteria, draft, end_tokens=frozenset())
            with closing(self._emit(call)) as emitted:
                for token, *_ in emitted:
                    yield token

        return self._turn.stream(ids)

    def _emit(self, call: Call) -> Generator[Emitted, None, None]:
        """Answer `call`, token by token; whatever ends it, `input_ids` and `n_tokens` are what the cache holds."""
        assert self._racer is not None
        target, stats = self._target, GenerationStats()
        self._stats = call.stats = stats
        target.take_over(self._input_ids.tolist())
        sampler = CallSampler(self, call.processors, call.settings, self._candidates_of_row)
        n = len(call.prompt)
        try:
            stream = self._racer.generate(
                call.prompt,
                sampler,
                max_tokens=call.max_tokens or self._n_ctx,
                end_tokens=call.end_tokens,
                stats=stats,
                draft=call.draft,
            )
            if call.on_rows:
                target.clear()
            reads = (call.on_rows or self._logits_all) and 0 < n < self._n_ctx
            held = self._read(call) if reads else None
            with closing(stream):
                for k, emitted in enumerate(stream):
                    stats.cached_tokens = stats.cached_tokens if held is None else held
                    self.n_tokens = n + k
                    if self._logits_all:
                        self.scores[n + k - 1] = emitted.logits
                    if call.criteria is not None and call.criteria(self._input_ids, emitted.logits):
                        stats.finish_reason = "stop"
                        return
                    yield emitted
        finally:
            self.n_tokens = len(target.held)
            self.input_ids[: self.n_tokens] = target.held
            self._requires_eval = True

    def _read(self, call: Call) -> int:
        """Read the prompt with all its rows, for whoever wants them; how many tokens were held already."""

        def see(tokens: Tokens, rows: Rows) -> None:
            if self._logits_all:
                end = len(self._target.held)
                self.scores[end - len(tokens) : end] = rows
            if call.on_rows:
                call.on_rows(tokens, rows)

        with call.stats.timing("prefill_seconds"):
            return self._target.prefill(call.prompt[:-1], see)

    # --- completions ---

    def create_completion(
        self, *args: Any, racer: RacerSetting = None, corpora: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """See llama_cpp.Llama.create_completion; `racer` and `corpora` hold for this call."""
        with self._asking(racer, corpora):
            return super().create_completion(*args, **kwargs)

    def __call__(
        self, *args: Any, racer: RacerSetting = None, corpora: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """See llama_cpp.Llama.__call__; `racer` and `corpora` hold for this call."""
        with self._asking(racer, corpora):
            return super().__call__(*args, **kwargs)

    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *args: Any,
        racer: RacerSetting = None,
        corpora: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """See llama_cpp.Llama.create_chat_completion; `racer` and `corpora` hold for this call.

        A control token's spelling in a message stays text.
        """
        messages, mark = self._mark_control_tokens(messages)
        with self._asking(racer, corpora, mark):
            answer = super().create_chat_completion(messages, *args, **kwargs)
            asked = _asked.get()
        return answer if isinstance(answer, dict) else _asking_on(asked, answer)

    def _create_completion(self, prompt: str | Sequence[int], **request: Any) -> Iterator[dict[str, Any]]:
        draft = self._draft_asked_for()
        if draft is None:
            parents = super()._create_completion
            return self._turn.stream(lambda: parents(prompt, **request))
        stream = request.pop("stream")
        if stream:
            return self._turn.stream(lambda: Completion(self, prompt, draft, **request).chunks())

        def whole() -> Iterator[dict[str, Any]]:
            with self._turn:
                answer = Completion(self, prompt, draft, **request).whole()
            yield answer

        return whole()

    @contextmanager
    def _asking(self, racer: RacerSetting, corpora: Sequence[str] | None, mark: str = "") -> Iterator[None]:
        """Lets `racer` reach the call that the parent's methods make in the body, unless they were asked before."""
        before = _asked.get()
        if racer is None and corpora is None and not mark and before is not None and before.llama == id(self):
            yield
            return
        if self._racer is not None:
            self._racer.for_answer(racer, corpora)  # what is wrong with it is said here, not at a stream's first token
        reset = _asked.set(_Asked(id(self), racer, corpora, mark))
        try:
            yield
        finally:
            _asked.reset(reset)

    def _draft_asked_for(self) -> DraftConfig | None:
        """What the call in progress shall draft; None: this Llama leaves it to the parent."""
        asked = _asked.get()
        if self._racer is None:
            return None
        ours = asked is not None and asked.llama == id(self)
        return self._racer.for_answer(asked.racer, asked.corpora) if asked and ours else self._racer.for_answer(None)

    def _mark_control_tokens(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Any, str]:
        """The messages with a mark inside each control token's spelling, and the mark; "" where there is none."""
        if self._racer is None or self.chat_handler is not None:
            return messages, ""  # a handler of its own, for images say, may tokenize elsewhere
        marked, mark = mark_control_tokens(self._lent, messages)
        return (marked, mark) if marked != [dict(message) for message in messages] else (messages, "")

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        self._turn.check()
        asked = _asked.get()
        mark = asked.mark.encode() if asked is not None and asked.llama == id(self) else b""
        if not mark or mark not in text:
            return list(super().tokenize(text, add_bos, special))
        first, *others = text.split(mark)
        tokens = list(super().tokenize(first, add_bos, special))
        for part in others:
            inside = native_tokenizer(self)
            tokens += tokenize_inside(self._lent, part.decode()) if inside else super().tokenize(part, False, special)
        return tokens

    def detokenize(self, *args: Any, **kwargs: Any) -> bytes:
        self._turn.check()
        return bytes(super().detokenize(*args, **kwargs))

    # --- what else touches the context, in its turn ---

    def eval(self, tokens: Sequence[int]) -> None:
        with self._turn:
            if self._racer is None:
                super().eval(tokens)
                return
            if self.n_tokens + len(tokens) > self._n_ctx:
                raise ContextFullError(f"Requested tokens ({self.n_tokens + len(tokens)}) exceed {self._n_ctx_of()}")
            self._hold()
            super().eval(tokens)
            self._target.take_over(self._input_ids.tolist())

    def _hold(self) -> None:
        """Make the cache hold `input_ids`: the caller may have cut them where it can't go back."""
        tokens = self._input_ids.tolist()
        self._target.take_over(tokens)
        if self._target.held != tokens:
            self._target.prefill(tokens)

    def reset(self) -> None:
        with self._turn:
            super().reset()
            if self._racer is not None:
                self._target.clear()

    def sample(self, *args: Any, **kwargs: Any) -> int:
        with self._turn:
            return int(super().sample(*args, **kwargs))

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return super().embed(*args, **kwargs)

    def save_state(self) -> Any:
        with self._turn:
            if self._racer is not None:
                self._hold()
                self._target.only_text()
            return super().save_state()

    def load_state(self, state: Any) -> None:
        with self._turn:
            if self._racer is None:
                super().load_state(state)
                return
            if state.n_tokens > self._n_ctx:
                raise ContextFullError(f"The state's tokens ({state.n_tokens}) exceed {self._n_ctx_of()}")
            self._target.clear()
            rows = slice(None) if self._logits_all else slice(-1, None)
            super().load_state(State(**{**vars(state), "scores": state.scores[rows]}))
            self.input_ids = np.resize(self.input_ids, self._n_ctx)
            self._target.take_over(self._input_ids.tolist())

    def forget(self) -> None:
        """Empty the cache, and start with a drafter that has learned nothing."""
        with self._turn:
            self.reset()
            if self._racer is not None:
                self._racer.forget()

    def set_seed(self, seed: int) -> None:
        """The seed of the calls to come; -1 is another one each time."""
        super().set_seed(UNSEEDED if seed < 0 else seed)

    def n_ctx(self) -> int:
        """Tokens of prompt and answer together. Room for draft trees comes on top."""
        return int(self._n_ctx if self._racer is not None else super().n_ctx())

    @property
    def _scores(self) -> Any:
        return super()._scores if self._logits_all else self.scores[:1]

    def _tell(self, message: str) -> None:
        if self.verbose:
            print(f"racer_local: {message}", file=sys.stderr)

    def _n_ctx_of(self) -> str:
        return f"context window of {self._n_ctx}; open it with a larger n_ctx, or shorten the prompt"

    def close(self) -> None:
        """Free the model. Waits for a call in progress, and ends a stream that nobody reads now."""
        if not hasattr(self, "_stack") or self._turn.over:
            return
        with nullcontext() if self._turn.waits_to_be_read() else self._turn:
            self._turn.over = True
            super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "racer": self._draft}


def _asking_on(asked: _Asked | None, items: Iterator[Any]) -> Generator[Any, None, None]:
    """The items of a chat handler's stream, each made with what its call asked for in force."""
    try:
        while True:
            reset = _asked.set(asked)
            try:
                item = next(items, None)
            finally:
                _asked.reset(reset)
            if item is None:
                return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close:
            close()
