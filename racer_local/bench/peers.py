"""Other programs that answer the same prompts: the binding's own `Llama`, and llama.cpp's server.

Each answers prompt tokens as a `Session` does, with the same file, threads, context and flash attention.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter, sleep

from racer_local.config import ContextConfig, ModelConfig, SamplingConfig
from racer_local.errors import ConfigError, ModelError
from racer_local.llama import Model
from racer_local.llama.parent import open_parent
from racer_local.session import Answer
from racer_local.stats import GenerationStats

BINDING, LOOKUP, SERVER = "llama-cpp-python", "llama-cpp-python+lookup", "llama-server"
LOOKUP_TOKENS = {False: 2, True: 10}
"""What the binding's manual advises to draft: without a GPU, and with one."""
PATIENCE_S = 300.0
"""Seconds for a server to load the model, and of silence while it answers."""


def take(answer: Answer, tokens: Iterator[int], end_tokens: Collection[int], max_tokens: int) -> None:
    """Tokens as they come, until an end token or `max_tokens`. What passes until the first is the prompt's time.

    The first token comes with the prompt, so the decoding time is that of one token less.
    """
    started, first, last = perf_counter(), 0.0, 0.0
    answer.stats.finish_reason = "stop"
    for token in tokens:
        last = perf_counter()
        first = first or last
        if token in end_tokens:
            break
        answer.token_ids.append(token)
        if len(answer.token_ids) == max_tokens:
            answer.stats.finish_reason = "length"
            break
    answer.stats.emitted = len(answer.token_ids)
    answer.stats.prefill_seconds, answer.stats.decode_seconds = first - started, last - first


class BindingPeer:
    """`llama_cpp.Llama`; with `lookup` its prompt lookup decoding, of as many tokens as its manual advises."""

    def __init__(self, model: Model, config: ModelConfig, context: ContextConfig, n_ctx: int, *, lookup: bool) -> None:
        self._model = model
        self._llm = open_parent(model.path, config, context, n_ctx, LOOKUP_TOKENS[model.offloads] if lookup else None)

    def answer(self, prompt: Sequence[int], *, sampling: SamplingConfig, max_tokens: int) -> Answer:
        """As `Session.answer`. Raises what the binding raises."""
        answer = Answer(GenerationStats(prompt_tokens=len(prompt)))
        if sampling.seed is not None:
            self._llm.set_seed(sampling.seed)
        names = {"temp": "temperature", **{name: name for name in ("top_k", "top_p", "min_p", "repeat_penalty")}}
        options = {theirs: getattr(sampling, ours) for theirs, ours in names.items()}
        with closing(self._llm.generate(prompt, **options)) as tokens:
            take(answer, tokens, self._model.end_tokens, max_tokens)
        return answer

    def forget(self) -> None:
        self._llm.reset()

    def close(self) -> None:
        self._llm.close()


class ServerPeer:
    """llama.cpp's server in a process of its own, drafting by one of its `--spec-type`s."""

    def __init__(
        self, program: Path, model: Model, config: ModelConfig, context: ContextConfig, n_ctx: int, spec_type: str
    ) -> None:
        self._model, self._port = model, 0
        kv_type = context.kv_type or "f16"
        self._command = [
            str(program),
            *("--model", str(model.path), "--host", "127.0.0.1", "--parallel", "1", "--ctx-size", str(n_ctx)),
            *("--threads", str(context.n_threads), "--threads-batch", str(context.n_threads)),
            *("--batch-size", str(context.n_batch), "--flash-attn", "on" if context.flashes(model.offloads) else "off"),
            *("--cache-type-k", kv_type, "--cache-type-v", kv_type),
            *("--gpu-layers", str(config.gpu_layers if config.gpu_layers >= 0 else 999) if model.offloads else "0"),
            *("--spec-type", spec_type),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        try:
            self._wait_for_start()
        except BaseException:  # an interruption too leaves nothing behind
            self.close()
            raise

    def _wait_for_start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        with TemporaryFile() as said:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-Z must not stop it amid an answer
            )
            for _ in range(int(10 * PATIENCE_S)):
                sleep(0.1)
                if self._process.poll() is not None:
                    said.seek(0)
                    last = (said.read().decode("utf-8", "replace").strip().splitlines() or ["nothing"])[-1]
                    raise ModelError(f"{self._command[0]} ended before it was ready; it said: {last}")
                with suppress(OSError), closing(self._connection()) as connection:
                    connection.request("GET", "/health")
                    if connection.getresponse().status == 200:
                        return
        raise ModelError(f"{self._command[0]} was not ready after {PATIENCE_S:.0f} seconds")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)

    def answer(self, prompt: Sequence[int], *, sampling: SamplingConfig, max_tokens: int) -> Answer:
        """As `Session.answer`; the decoding time is what the server tells, the rest the prompt's.

        Streaming would leave out tokens inside a character. Raises ModelError with what the server answered.
        """
        answer = Answer(GenerationStats(prompt_tokens=len(prompt)))
        body = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "return_tokens": True,
            "seed": -1 if sampling.seed is None else sampling.seed,
            **{name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")},
        }
        started = perf_counter()
        try:
            with closing(self._connection()) as connection:
                connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
                response = connection.getresponse()
                said = response.read()
        except http.client.HTTPException as error:
            raise ModelError(f"{SERVER} broke off its answer ({error!r})") from error
        seconds = perf_counter() - started
        if response.status != 200:
            raise ModelError(f"{SERVER} answered {response.status}: {said.decode('utf-8', 'replace')}")
        told = json.loads(said)
        if not {"tokens", "timings"} <= told.keys():
            raise ModelError(f"{SERVER} tells no tokens or timings; take a newer one")
        stats, timings = answer.stats, told["timings"]
        answer.token_ids = [token for token in told["tokens"] if token not in self._model.end_tokens]
        stats.emitted = int(timings["predicted_n"])
        stats.decode_seconds = timings["predicted_ms"] / 1e3
        stats.prefill_seconds = seconds - stats.decode_seconds
        stats.drafted, stats.accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
        stats.steps = stats.emitted - stats.accepted
        return answer

    def forget(self) -> None:
        """A new process: there is no other way to empty what its drafters learned."""
        self.close()
        self._start()

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
            self._process.kill()
            self._process.wait()
            self._process = None


def spec_types(program: Path) -> list[str]:
    """Those of the server's ways to draft that need no second model, and none.

    Raises ConfigError for a file that is no such server.
    """
    try:
        asked = subprocess.run(
            [program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} can't be run ({error}); name llama.cpp's llama-server") from error
    found = re.search(r"--spec-type\s+(\S+)", asked.stdout)
    if not found:
        raise ConfigError(f"{program} knows no --spec-type; name a newer llama-server")
    return ["none", *(name for name in found[1].split(",") if name.startswith("ngram"))]
