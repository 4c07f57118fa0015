"""Do drafts leave the token ids as they are? The same prompts, plainly and through each drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from racer_local.bench.results import PLAIN
from racer_local.bench.ways import as_prompt, parse_draft
from racer_local.config import ContextConfig, SamplingConfig
from racer_local.llama import Model
from racer_local.session import Answer, Session, first_difference


def measure(
    model: Model,
    prompts: Sequence[str],
    drafts: Sequence[str],
    context: ContextConfig,
    sampling: SamplingConfig,
    max_tokens: int,
    *,
    exact: bool = False,
    corpora: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """After each prompt the sums so far: {drafter: {equal, of, largest_gap, far, mean_accepted_tokens}}.

    Every drafter has one context for all prompts; a text's common beginning is not read again.

    largest_gap: over the answers that differ, the largest distance between the two tokens' logits at the first
    difference, None where all agree. far: those in which one of the two is not among the row's likeliest.
    """
    sums: dict[str, dict[str, Any]] = {
        draft: {"equal": 0, "of": 0, "emitted": 0, "steps": 0, "largest_gap": None, "far": 0} for draft in drafts
    }
    configs = {draft: replace(parse_draft(draft, corpora), exact=exact) for draft in (PLAIN, *drafts)}
    with ExitStack() as stack:
        sessions = {draft: stack.enter_context(Session(model, context, config)) for draft, config in configs.items()}
        for text in prompts:
            prompt = as_prompt(model, [{"role": "user", "content": text}])
            answers = {
                draft: session.answer(prompt, sampling=sampling, max_tokens=max_tokens, record=True)
                for draft, session in sessions.items()
            }
            for draft, so_far in sums.items():
                _add(so_far, answers[PLAIN], answers[draft])
            yield {
                draft: {
                    **{key: so_far[key] for key in ("equal", "of", "largest_gap", "far")},
                    "mean_accepted_tokens": round(so_far["emitted"] / max(1, so_far["steps"]), 4),
                }
                for draft, so_far in sums.items()
            }


def _add(so_far: dict[str, Any], plain: Answer, drafted: Answer) -> None:
    difference = first_difference(plain, drafted)
    so_far["equal"] += difference is None
    so_far["of"] += 1
    so_far["emitted"] += drafted.stats.emitted
    so_far["steps"] += drafted.stats.steps
    if difference is not None and difference.gap is None:
        so_far["far"] += 1
    elif difference is not None and difference.gap is not None:
        so_far["largest_gap"] = max(round(difference.gap, 4), so_far["largest_gap"] or 0.0)
