"""Every setting and every default, each written once. Flags and request fields are built from these classes.

Values are checked where an object is made, so the rest of the package trusts them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from racer_local.errors import ConfigError

MAX_SEQUENCES = 256
"""llama.cpp's LLAMA_MAX_SEQ: the most sequences that one context can hold."""

MAX_NODES = MAX_SEQUENCES - 1
"""The largest draft tree, root counted: its leaves and two spare sequences must fit into MAX_SEQUENCES."""

PROMPT_ROWS = 64
"""Prompt tokens of one forward where the drafter learns from their logits: bounds the memory of those rows."""

DRAFTERS = {"none": 1, "lookup": 11, "logits": 64, "retrieval": 64, "paper": 64, "racer": 64}
"""The drafters, and each one's own budget of nodes, root counted."""
COST_CURVES = {
    "cpu": "1:1 2:1.45 4:1.53 8:2.79 12:3.4 16:3.4 32:6.4 64:12.8",
    "cpu-amx": "1:1 2:1.61 4:1.66 8:1.93 12:2.27 16:2.59 32:4.17 64:8",
    "unified": "1:1 2:1.05 4:1.12 8:1.25 16:1.6 32:2.4 64:4",
    "gpu": "1:1 16:1.03 32:1.06 64:1.12 128:1.3",
}
"""Curves to judge drafters by: two measured (2-core x86, a 1.5B model, Q4_K_M), two assumed."""
RECURRENT_NODES = 8
"""The longest draft, root counted, for a model with a recurrent state: it takes that many copies of the state."""
DEFAULT_MAX_TOKENS = 256
KV_TYPES = ("f16", "bf16", "q8_0", "f32")
FLASH_ATTN = ("auto", "on", "off")


def cache_home() -> Path:
    """The folder for models and measurements: $RACER_LOCAL_HOME, else the user's cache folder."""
    if home := os.environ.get("RACER_LOCAL_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "racer_local"


def allowed_cpus() -> set[int]:
    """The CPUs that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cpus() -> int:
    """How many CPUs this process may use: affinity and, on Linux, the cgroup's quota."""
    cpus = len(allowed_cpus())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()[:2]
        return cpus if quota == "max" else min(cpus, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        return cpus


@cache
def default_threads() -> int:
    """One thread a usable physical core; on a Mac, a performance core.

    Every operation of a forward ends in a spinning barrier, so a thread too many is a cliff, not a slope.
    """
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True)
        return int(asked.stdout) if asked.stdout.strip().isdigit() else usable_cpus()
    cores = set()
    for cpu in allowed_cpus():
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return usable_cpus()
    return min(usable_cpus(), len(cores))


def _setting(
    default: Any, help: str, *, flag: str | None = None, choices: Sequence[str] | None = None, metavar: str = "N"
) -> Any:
    """A field with what a command line flag needs to know of it; `flag` where it is not the field's name."""
    return field(default=default, metadata={"help": help, "flag": flag, "choices": choices, "metavar": metavar})


def _check(name: str, value: float, low: float, high: float, what: str = "") -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}; it must be from {low} to {high}{what and ' ' + what}")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def _paths(name: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)):
        raise ConfigError(f"{name} is {values!r}; it must be a list of files")
    if not all(isinstance(value, (str, os.PathLike)) and os.fspath(value) for value in values):
        raise ConfigError(f"{name} is {list(values)}; each must be the path of an index")
    return tuple(os.fspath(value) for value in values)


Options = Mapping[str, int | float | bool | tuple[float, ...]]


@dataclass(frozen=True)
class ModelConfig:
    """How a GGUF file is loaded (llama_model_params)."""

    gpu_layers: int = _setting(-1, "layers kept on the GPU, -1 is all; without a GPU backend it says nothing")
    options: Options = field(default_factory=dict)
    """Further fields of llama_model_params by their own name, for example {"main_gpu": 1}."""

    def __post_init__(self) -> None:
        _check("gpu_layers", self.gpu_layers, -1, 100_000)


@dataclass(frozen=True)
class ContextConfig:
    """How a context is opened (llama_context_params)."""

    DEFAULT_CTX: ClassVar[int] = 4096

    n_ctx: int | None = _setting(
        None, f"tokens of prompt and answer together; default: {DEFAULT_CTX}, or what the model knows", flag="ctx"
    )
    n_batch: int = _setting(512, "prompt tokens of one forward", flag="batch")
    threads: int | None = _setting(None, "threads of a forward; default: one a usable physical core")
    flash_attn: str = _setting(
        "auto",
        "auto: off on a CPU, where it makes each drafted node dear; on where layers are offloaded",
        choices=FLASH_ATTN,
    )
    kv_type: str | None = _setting(
        None, "type of the cached keys and values; default: f16, with --exact on a CPU bf16", choices=KV_TYPES
    )
    options: Options = field(default_factory=dict)
    """Further fields of llama_context_params by their own name, for example {"rope_freq_base": 1e6}."""

    def __post_init__(self) -> None:
        if self.n_ctx is not None:
            _check("n_ctx (--ctx)", self.n_ctx, 8, 1 << 24)
        _check("n_batch (--batch)", self.n_batch, 1, 1 << 16)
        if self.threads is not None:
            _check("threads", self.threads, 1, 512, f"(this machine: {default_threads()})")
        _check_choice("flash_attn", self.flash_attn, FLASH_ATTN)
        if self.kv_type is not None:
            _check_choice("kv_type", self.kv_type, KV_TYPES)
        if self.kv_type == "q8_0" and self.flash_attn == "off":
            raise ConfigError("kv_type q8_0 needs flash attention; set flash_attn to on, or kv_type to f16")

    @property
    def n_threads(self) -> int:
        """Threads in force."""
        return self.threads or default_threads()

    def flashes(self, offloads: bool) -> bool:
        """Whether attention is flash attention, where layers are offloaded or not."""
        return self.flash_attn == "on" or self.kv_type == "q8_0" or (self.flash_attn == "auto" and offloads)

    def for_exact(self) -> ContextConfig:
        """What is left open set to what makes a row of a batch equal a single one on a CPU."""
        flash_attn = "on" if self.flash_attn == "auto" else self.flash_attn
        return replace(self, flash_attn=flash_attn, kv_type=self.kv_type or "bf16")

    @property
    def batch_equals_single(self) -> bool:
        """Whether a row of a batch can equal a single one to the bit on a CPU, where the build's kernels allow it."""
        return self.kv_type == "q8_0" or (self.kv_type == "bf16" and self.flash_attn == "on")


@dataclass(frozen=True)
class SamplingConfig:
    """The sampler chain, in llama.cpp's order: penalties, top-k, top-p, min-p, temperature, draw."""

    temperature: float = _setting(0.0, "0 is greedy: the likeliest token, the lowest id at a tie")
    top_k: int = _setting(40, "draw among the k likeliest tokens; 0 is off")
    top_p: float = _setting(0.95, "draw among the likeliest tokens that hold this probability; 1 is off")
    min_p: float = _setting(0.05, "drop tokens below this share of the likeliest's probability; 0 is off")
    repeat_penalty: float = _setting(1.0, "divide the logits of recent tokens; 1 is off")
    frequency_penalty: float = _setting(0.0, "lower the logits of recent tokens by their count")
    presence_penalty: float = _setting(0.0, "lower the logits of recent tokens once")
    penalty_last_n: int = _setting(64, "tokens that penalties look back on, the prompt's included")
    seed: int | None = _setting(None, "repeats an answer; -1 or none: a fresh one every time")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens, before all else."""
    grammar: str | None = None
    """GBNF (llama.cpp's grammars/README.md) that the answer keeps to, from its rule `root` on."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, 100)
        _check("top_k", self.top_k, 0, 1 << 30)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("repeat_penalty", self.repeat_penalty, 0.01, 100)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        _check("penalty_last_n", self.penalty_last_n, 1, 1 << 20)
        if self.seed is not None:
            _check("seed", self.seed, -1, 0xFFFFFFFE)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token}", bias, -100, 100)

    @property
    def penalizes(self) -> bool:
        return (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def likeliest(self) -> bool:
        """Whether each token is the likeliest of its row as the model gives it."""
        return self.greedy and not (self.penalizes or self.logit_bias) and self.grammar is None

    @property
    def seeded(self) -> bool:
        return self.seed is not None and self.seed >= 0


_KINDS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "str": (str,),
    "float": (int, float),
    "int | None": (int, type(None)),
    "str | None": (str, os.PathLike, type(None)),
    "tuple[str, ...]": (list, tuple),
}


@dataclass(frozen=True)
class DraftConfig:
    """What is drafted. The numbers are the paper's where it gives any."""

    draft: str = _setting("racer", "the drafter; none is plain decoding", choices=tuple(DRAFTERS))
    max_nodes: int | None = _setting(None, "nodes of a draft tree, root counted; default: the drafter's own")
    exact: bool = _setting(
        False,
        "the token ids of plain decoding, to the bit: settings of the context that are left open are chosen for it, "
        "and no tree is larger than was found to change nothing",
    )
    corpora: tuple[str, ...] = _setting(
        (), "racer: draft from this index too (racer-local index build); may be repeated", flag="corpus", metavar="FILE"
    )
    remember: str | None = _setting(
        None, "add the answers to this index, for later drafts; it is made if it is not there", metavar="FILE"
    )
    breadth: int = 8
    """k: next tokens kept per vocabulary id ("copy-logit")."""
    ngram: int = 10
    """n: the longest n-gram in the retrieval trie."""
    trie_nodes: int = 10_000
    """Most nodes of that trie; beyond it the least recently used leaf is evicted."""
    lookup_ngram: int = 3
    """Prompt lookup: the longest suffix that is looked up."""
    history_tokens: int = _setting(
        1 << 18, "racer: tokens of earlier text that are remembered, a power of two; 74 bytes each", flag="history"
    )
    fade: float = 0.98
    """racer: each step of a draft is taken to be so much less likely than estimated; see `kernels.growth.grow`."""
    caution: float = 0.5
    """racer: how much more than its share the time counts that a draft may lose."""

    def __post_init__(self) -> None:
        _check_choice("draft", self.draft, tuple(DRAFTERS))
        object.__setattr__(self, "corpora", _paths("corpora (--corpus)", self.corpora))
        if self.remember is not None:
            object.__setattr__(self, "remember", *_paths("remember (--remember)", [self.remember]))
        if self.corpora and self.draft not in ("racer", "none"):
            raise ConfigError(
                f"the {self.draft} drafter reads no indexes; leave out corpora (--corpus), or draft with racer"
            )
        if self.max_nodes is not None:
            _check("max_nodes", self.max_nodes, 1, MAX_NODES, "(the root counts)")
        _check("breadth", self.breadth, 1, 64)
        _check("ngram", self.ngram, 3, 64)
        _check("trie_nodes", self.trie_nodes, self.ngram * (self.ngram + 3), 1 << 24)
        _check("lookup_ngram", self.lookup_ngram, 1, 64)
        _check("history_tokens (--history)", self.history_tokens, 1 << 10, 1 << 26)
        if self.history_tokens & (self.history_tokens - 1):
            raise ConfigError(
                f"history_tokens (--history) is {self.history_tokens}; it must be a power of two, "
                f"for example {1 << self.history_tokens.bit_length()}"
            )
        _check("fade", self.fade, 0, 1)
        _check("caution", self.caution, 0, 10)

    @classmethod
    def of(cls, value: bool | Mapping[str, Any] | DraftConfig | None) -> DraftConfig:
        """From what a `racer` argument may be: True and None are the default, False is plain decoding.

        Raises ConfigError, listing the known keys, for an unknown one.
        """
        if isinstance(value, DraftConfig):
            return value
        if value is None or isinstance(value, bool):
            return cls(draft="none") if value is False else cls()
        return cls().with_keys(value)

    def with_keys(self, changes: Mapping[str, Any], allowed: Collection[str] | None = None) -> DraftConfig:
        """With these settings changed; `allowed` are those that may be, by default all. Values are checked."""
        if not isinstance(changes, Mapping):
            raise ConfigError(f"racer is {changes!r}; it must be True, False, a DraftConfig or a dict of its settings")
        known = {setting.name: setting for setting in fields(self)}
        allowed = known if allowed is None else allowed
        for name, value in changes.items():
            if name not in allowed:
                later = " while it is open" if name in known else ""
                raise ConfigError(f"racer has no setting {name!r}{later}; known: {', '.join(allowed)}")
            kinds = _KINDS[str(known[name].type)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise ConfigError(f"racer's {name} is {value!r}; it must be of type {known[name].type}")
        return replace(self, **changes)

    @property
    def nodes(self) -> int:
        """The budget in force, root counted; 1 is plain decoding."""
        own = DRAFTERS[self.draft]
        return own if self.max_nodes is None or own == 1 else self.max_nodes

    @property
    def needs_cost(self) -> bool:
        """Whether the drafter decides by what verifying costs."""
        return self.draft == "racer" and self.nodes > 1


LOOPBACK = ("127.0.0.1", "::1", "localhost")


def parse_size(text: str, what: str) -> int:
    """A number of bytes, with K, M or G behind it if you like. Raises ConfigError, naming the flag `what`."""
    number, unit = text[:-1], text[-1:].upper()
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit)
    if factor is None:
        number, factor = text, 1
    if not (number.isascii() and number.isdecimal() and int(number)):
        raise ConfigError(f"{what} is {text!r}; it must be a number of bytes such as 500000, 200K, 64M or 2G")
    return int(number) * factor


@dataclass(frozen=True)
class ServerConfig:
    """What the server listens to, and how much it lets one client ask for."""

    host: str = _setting("127.0.0.1", "address to listen on; any but this machine's own demands a key", metavar="ADDR")
    port: int = _setting(8080, "port to listen on; 0 takes a free one")
    api_keys: tuple[str, ...] = _setting(
        (),
        "a key that a client must have; may be repeated, and what one key teaches the drafter serves no other "
        "(also: $RACER_LOCAL_API_KEYS, with commas between)",
        flag="api-key",
        metavar="KEY",
    )
    queue: int = _setting(32, "requests that wait at most; more are told to try again later (429)")
    grace: float = _setting(30.0, "seconds that a running answer has when the server is told to stop")
    max_ram: str | None = _setting(None, "memory of all loaded models together, for example 8G", metavar="SIZE")
    max_body: str = _setting("4M", "size of a request", metavar="SIZE")
    max_n: int = _setting(32, "answers of one request: its prompts times n")
    most_tokens: int = _setting(8192, "tokens that a request may ask for", flag="limit-tokens")
    folders: tuple[str, ...] = _setting(
        (),
        "a folder of which clients may have an index made (POST /v1/corpora), which all keys share; may be repeated",
        flag="folder",
        metavar="DIR",
    )
    cors: tuple[str, ...] = _setting(
        (), "a web page's origin whose scripts may use the server; may be repeated", metavar="ORIGIN"
    )

    def __post_init__(self) -> None:
        _check("port", self.port, 0, 65535)
        _check("queue", self.queue, 1, 10_000)
        _check("grace", self.grace, 0, 3600)
        _check("max_n (--max-n)", self.max_n, 1, 1000)
        _check("most_tokens (--limit-tokens)", self.most_tokens, 1, 1 << 24)
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError(
                "a key (--api-key, $RACER_LOCAL_API_KEYS) must have 8 or more printable ASCII characters and no blank"
            )
        if self.host not in LOOPBACK and not self.api_keys:
            raise ConfigError(
                f"on {self.host} everybody who reaches this machine could use the server; give it an --api-key, "
                f"or leave out --host"
            )
        for folder in self.folders:
            if not Path(folder).expanduser().is_dir():
                raise ConfigError(f"--folder {folder} is no folder; name one that exists")
        for origin in self.cors:
            if "://" not in origin or origin.endswith("/"):
                raise ConfigError(f"--cors {origin!r} must be an origin such as http://localhost:3000")
        self.body_bytes, self.ram_bytes  # noqa: B018  (to be checked now)

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, "max_body (--max-body)")

    @property
    def ram_bytes(self) -> int | None:
        return None if self.max_ram is None else parse_size(self.max_ram, "max_ram (--max-ram)")
