"""The Drafter protocol, and the drafters by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from racer_local.config import DraftConfig
from racer_local.errors import ConfigError
from racer_local.tree import DraftTree, Int32s, Limit, NodeIds, Tokens

if TYPE_CHECKING:  # they load numba, which plain decoding does without
    from racer_local.corpus.corpora import Corpora
    from racer_local.cost import VerifyCost


@dataclass(frozen=True, eq=False)
class TopK:
    """The k likeliest next tokens after each node of an evaluated tree."""

    ids: Int32s
    """[n, k] vocabulary ids, likeliest first; -1 where there are fewer."""
    logits: NDArray[np.float32]
    """[n, k] their logits."""

    @classmethod
    def none(cls) -> TopK:
        """For a drafter that learns nothing from logits."""
        return cls(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))

    @classmethod
    def of(cls, rows: NDArray[np.float32], k: int) -> TopK:
        """From logits [n, vocabulary]."""
        from racer_local.kernels.topk import top_k

        ids, logits = np.empty((len(rows), k), np.int32), np.empty((len(rows), k), np.float32)
        top_k(rows, ids, logits)
        return cls(ids, logits)


class Drafter(Protocol):
    """Guesses what the target will say next. It never touches the target."""

    breadth: int
    """The k of the TopK that `observe` wants; 0 for a drafter that learns nothing from logits."""
    prompt_rows: int | None
    """Of how many prompt tokens, the last ones, `observe` wants the logits; None: of all."""

    def begin(self, prompt: Tokens) -> None:
        """A new prompt. What was learned from earlier ones is kept."""
        ...

    def draft(self, root: int, limit: Limit) -> DraftTree:
        """A tree from the last emitted token on, within `limit`; a lone root is a legal answer.

        End tokens are never drafted: what follows them is not wanted, and as a bonus token they come free.
        """
        ...

    def observe(self, tree: DraftTree, top_k: TopK) -> None:
        """What the target thinks after every evaluated node, rejected ones too; a prompt comes as chains."""
        ...

    def accept(self, path: NodeIds, bonus: int) -> None:
        """The nodes of the last draft that became text, root first, and the token emitted after them."""
        ...


@runtime_checkable
class ReadsCorpora(Protocol):
    """A drafter that can draft from the user's indexes."""

    def use(self, corpora: Corpora | None) -> None:
        """From the next prompt on, these and no others."""
        ...


def make_drafter(
    config: DraftConfig, n_vocab: int, end_tokens: Collection[int] = (), cost: VerifyCost | None = None
) -> Drafter:
    """The drafter that `config` names. `end_tokens` are never drafted.

    `paper` is RACER as published: retrieval first, the logits tree fills what is left, and a node that both propose
    is one node. `racer` grows one tree from all evidence, as large as `cost` makes it pay, which it then must have.
    """
    from racer_local.draft.none import NoDrafter

    if config.nodes == 1:
        return NoDrafter()
    from racer_local.draft.logits import CueTable
    from racer_local.draft.lookup import PromptLookup
    from racer_local.draft.retrieval import NgramTrie
    from racer_local.draft.sources import SourcesDrafter
    from racer_local.kernels import warm_up

    warm_up("topk", *(("growth", "drift") if config.needs_cost else ("layout", "cues", "lookup", "automaton")))
    banned = np.zeros(n_vocab, np.bool_)
    banned[list(end_tokens)] = True
    if config.needs_cost:
        from racer_local.draft.racer import RacerDrafter

        if cost is None:
            raise ConfigError("the racer drafter needs a cost curve (racer_local.cost.VerifyCost)")
        return RacerDrafter(config, banned, cost)
    sources = {
        "lookup": (PromptLookup,),
        "logits": (CueTable,),
        "retrieval": (NgramTrie,),
        "paper": (NgramTrie, CueTable),
    }[config.draft]
    return SourcesDrafter([source(config, banned) for source in sources], config.nodes)
