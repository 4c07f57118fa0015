"""What /metrics shows to Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from racer_local.stats import GenerationStats

FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server; a ratio is the reader's to make."""

    def __init__(self, waiting: Callable[[], int], loaded: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        labels = ["model"]
        self.requests = Counter(
            "racer_requests", "requests by route and status", ["route", "status"], registry=registry
        )
        self._prompt = Counter("racer_prompt_tokens", "tokens of prompts", labels, registry=registry)
        self._cached = Counter("racer_cached_tokens", "of these, held already", labels, registry=registry)
        self._emitted = Counter("racer_emitted_tokens", "tokens of answers", labels, registry=registry)
        self._steps = Counter("racer_steps", "forwards after prefill", labels, registry=registry)
        self._drafted = Counter("racer_drafted_tokens", "draft nodes verified", labels, registry=registry)
        self._accepted = Counter(
            "racer_accepted_tokens", "draft nodes that became text", [*labels, "source"], registry=registry
        )
        self._seconds = Counter("racer_seconds", "time in each phase", [*labels, "phase"], registry=registry)
        self.cancelled = Counter("racer_cancelled_requests", "requests whose client went away", registry=registry)
        self.first_token = Histogram(
            "racer_first_token_seconds",
            "from the request to the first token",
            labels,
            buckets=FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        Gauge("racer_waiting_requests", "requests in the queue", registry=registry).set_function(waiting)
        Gauge("racer_loaded_models", "models in memory", registry=registry).set_function(loaded)

    def count(self, model: str, stats: GenerationStats) -> None:
        """Take the counts of an answer in."""
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._cached.labels(model).inc(stats.cached_tokens)
        self._emitted.labels(model).inc(stats.emitted)
        self._steps.labels(model).inc(stats.steps)
        self._drafted.labels(model).inc(stats.drafted)
        for source, accepted in stats.accepted_by_source.items():
            self._accepted.labels(model, source).inc(accepted)
        for phase in ("prefill", "decode", "draft", "verify"):
            self._seconds.labels(model, phase).inc(getattr(stats, f"{phase}_seconds"))

    def text(self) -> bytes:
        return generate_latest(self.registry)
