"""What was found, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from racer_local.models import readable_size
from racer_local.tuning.quants import Copy
from racer_local.tuning.search import Candidate, Comparison, Found
from racer_local.tuning.trial import SIZES, Figures

MEASURES = ("drafted", "plain", "prompt", *(f"T({n})" for n in SIZES), "memory")
UNITS = "tokens/s of drafted and plain decoding and of reading a prompt; T(n), verifying n nodes, in plain forwards"


def flash_attention(candidate: Candidate, *, offloads: bool) -> str:
    """On or off, as it is in force."""
    on = candidate.kv_type == "q8_0" or candidate.flash_attn == "on" or (offloads and candidate.flash_attn == "auto")
    return "on" if on else "off"


def in_words(candidate: Candidate, *, offloads: bool) -> str:
    threads = f"{candidate.threads} thread{'s' if candidate.threads > 1 else ''}"
    attention = flash_attention(candidate, offloads=offloads)
    return f"{threads}, flash attention {attention}, {candidate.kv_type or 'f16'}"


def changed(found: Found) -> dict[str, Any]:
    """The settings of the best that are not the default's, by their names in ContextConfig."""
    names = ("threads", "flash_attn", "kv_type")
    return {
        name: getattr(found.best, name) for name in names if getattr(found.best, name) != getattr(found.default, name)
    }


def as_flags(settings: Mapping[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())


def table(found: Found, figures: Mapping[Candidate, Figures], *, offloads: bool) -> list[str]:
    """A row a candidate, in the order in which they were tried."""
    rows = [["threads", "flash", "cache", "x default", *MEASURES, ""]]
    for candidate in _tried(found, figures):
        names = [name for name, each in (("default", found.default), ("best", found.best)) if each == candidate]
        rows.append(
            [
                str(candidate.threads),
                flash_attention(candidate, offloads=offloads),
                candidate.kv_type or "f16",
                _ratio(found.relative.get(candidate)),
                *_cells(figures[candidate]),
                ", ".join(names),
            ]
        )
    return [*aligned(rows), *_failures(found, offloads=offloads)]


def copies_table(copies: Sequence[Copy], original: Figures, size: int) -> list[str]:
    """A row a copy, below one of the model itself."""
    rows = [["copy", "size", "x model", "same next token", "KL", *MEASURES, ""]]
    rows.append(["(the model)", readable_size(size), "1.00", "100%", "0", *_cells(original), ""])
    for copy in copies:
        if copy.bytes is None:
            continue
        near = copy.agreement
        rows.append(
            [
                copy.quant,
                readable_size(copy.bytes),
                _ratio(copy.comparison.gain if copy.comparison and copy.comparison.pairs else None),
                f"{100 * near.share:.1f}% of {near.positions}" if near else "-",
                f"{near.divergence:.3f}" if near else "-",
                *_cells(copy.figures),
                str(copy.path or ""),
            ]
        )
    return [*aligned(rows), *(f"{copy.quant}: {copy.failed}" for copy in copies if copy.failed)]


def conclusion(found: Found, *, offloads: bool) -> str:
    """The choice in one line."""
    default = in_words(found.default, offloads=offloads)
    if found.best != found.default and found.final:
        gain, noise = found.final.gain, found.final.noise
        return (
            f"best: {in_words(found.best, offloads=offloads)}; {gain:.2f}x (within {noise:.2f}) the speed of the "
            f"default: {default}"
        )
    if found.final and found.final.pairs:
        lost = in_words(found.final.challenger, offloads=offloads)
        return (
            f"the default stays: {default}; once more against it, {lost} had {found.final.gain:.2f}x its speed "
            f"(within {found.final.noise:.2f})"
        )
    return f"the default stays: {default}; nothing was faster by more than the noise"


def untried(found: Found, *, offloads: bool) -> Iterator[str]:
    """What was left out, and why."""
    if found.late:
        listed = "; ".join(in_words(candidate, offloads=offloads) for candidate in found.late)
        yield f"not tried for want of time (--time-budget): {listed}"
    if found.pointless:
        listed = ", ".join(str(candidate.threads) for candidate in found.pointless)
        yield f"not tried, since a number of threads between these and the best had lost clearly: {listed}"


def as_json(found: Found, figures: Mapping[Candidate, Figures], *, offloads: bool) -> dict[str, Any]:
    def settings(candidate: Candidate) -> dict[str, Any]:
        return {
            "threads": candidate.threads,
            "flash_attn": flash_attention(candidate, offloads=offloads),
            "kv_type": candidate.kv_type or "f16",
        }

    return {
        "default": settings(found.default),
        "best": settings(found.best),
        "changed": changed(found),
        "final": found.final and comparison_as_json(found.final),
        "candidates": [
            {
                **settings(candidate),
                "relative": _rounded(found.relative.get(candidate)),
                **figures_as_json(figures[candidate]),
            }
            for candidate in _tried(found, figures)
        ],
        "comparisons": [
            {
                "incumbent": settings(comparison.incumbent),
                "challenger": settings(comparison.challenger),
                **comparison_as_json(comparison),
            }
            for comparison in found.comparisons
        ],
        "not_tried": [settings(candidate) for candidate in (*found.late, *found.pointless)],
    }


def comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    noise = comparison.noise
    return {
        "gain": round(comparison.gain, 4) if comparison.pairs else None,
        "noise": round(noise, 4) if noise < float("inf") else None,
        "faster": comparison.faster,
        "pairs": [[round(speed, 3) for speed in pair] for pair in comparison.pairs],
        "failed": comparison.failed,
    }


def figures_as_json(figures: Figures) -> dict[str, Any]:
    return {
        "drafted_tokens_per_second": round(figures.drafted.tokens_per_second, 3),
        "plain_tokens_per_second": round(figures.plain.tokens_per_second, 3),
        "prompt_tokens_per_second": round(figures.prompt_tokens_per_second, 3),
        "mean_accepted_tokens": round(figures.drafted.mean_accepted_tokens, 4),
        "cost": {str(n): round(value, 4) for n, value in figures.relative.items()},
        "memory_bytes": figures.memory_bytes,
        "samples": figures.samples,
    }


def copy_as_json(copy: Copy) -> dict[str, Any]:
    near = copy.agreement
    return {
        "quant": copy.quant,
        "bytes": copy.bytes,
        "path": copy.path and str(copy.path),
        "comparison": copy.comparison and comparison_as_json(copy.comparison),
        "same_next_token": near and round(near.share, 5),
        "positions": near and near.positions,
        "divergence": near and round(near.divergence, 5),
        **figures_as_json(copy.figures),
        "failed": copy.failed,
    }


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _tried(found: Found, figures: Mapping[Candidate, Figures]) -> list[Candidate]:
    """Those of which there is a sample."""
    order = [found.default, *(comparison.challenger for comparison in found.comparisons)]
    return [each for each in dict.fromkeys(order) if each in figures and figures[each].samples]


def _failures(found: Found, *, offloads: bool) -> Iterator[str]:
    for comparison in found.comparisons:
        if comparison.failed:
            yield f"{in_words(comparison.challenger, offloads=offloads)}: {comparison.failed}"


def _cells(figures: Figures) -> list[str]:
    speeds = figures.drafted.tokens_per_second, figures.plain.tokens_per_second, figures.prompt_tokens_per_second
    costs = [f"{figures.relative[n]:.2f}" if n in figures.relative else "-" for n in SIZES]
    return [
        *(f"{speed:.1f}" if speed else "-" for speed in speeds),
        *costs,
        readable_size(figures.memory_bytes or None),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
