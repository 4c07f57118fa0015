"""From the target's drawn tokens to the accepted path: the rule that keeps the text the model's own."""

from __future__ import annotations

from collections.abc import Callable

from racer_local.tree import DraftTree, NodeIds


def verify(tree: DraftTree, draw: Callable[[int], int]) -> tuple[NodeIds, int]:
    """Walk the tree along the tokens that the target draws.

    `draw(node)` is the target's next token after `node`, one draw a visited node. If a child carries it, that
    child is accepted and visited next, else it is the bonus token. Every emitted token is thus one draw from
    the target's own distribution given the text before it, whatever was drafted.

    Returns the accepted path, the root first, and the bonus token.

    Worked example: in the tree 7-(1-2, 3) the draws 1 and then 5 accept node 1, and 5 is the bonus token.

    >>> verify(DraftTree.of([7, 1, 2, 3], [-1, 0, 1, 0]), {0: 1, 1: 5}.__getitem__)
    ([0, 1], 5)
    """
    path = [0]
    while True:
        token = draw(path[-1])
        node = tree.child(path[-1], token)
        if node < 0:
            return path, token
        path.append(node)
