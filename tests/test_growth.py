"""kernels.growth: the tree that is worth its cost, against a best-first search on sorted lists."""

from __future__ import annotations

import numpy as np
import pytest
from memories import context_after, corpora_of, new_memory, random_memory, random_row, random_text, tokens

from racer_local.kernels import acceptance, evidence, growth, history, keyed_cues, layout, suffixes
from racer_local.kernels.evidence import NODE_FEATURES, TOKEN_FEATURES
from racer_local.kernels.growth import LEAST, UNMATCHED
from racer_local.kernels.history import BREAK, CONTEXT
from racer_local.kernels.suffixes import NO_INDEX

FAR = 10**6
N_VOCAB = 30
MATCHED, CUED, INDEXED = SOURCES = 5, 6, 7


def banning(banned=()):
    mask = np.zeros(200, np.bool_)
    mask[list(banned)] = True
    return mask


def grow(memory, text, cost, nodes=32, leaves=FAR, depth=FAR, fade=1.0, caution=0.0, banned=(), room=None):
    """The promise, and (parent, token, depth, source) of each node behind the root. room: a scratch and a pool."""
    tree, pool = room or (layout.new_scratch(nodes), growth.new_pool(nodes))
    layout.start(tree, text[-1], nodes, leaves, depth)
    promise = growth.grow(
        memory,
        tokens(text),
        banning(banned),
        tokens(SOURCES),
        np.asarray(cost, float),
        np.float32(fade),
        np.float32(caution),
        tree,
        pool,
    )
    columns = (tree.parents, tree.tokens, tree.depths, tree.sources)
    return promise, list(zip(*(column[1 : tree.size[0]].tolist() for column in columns), strict=True))


def path_of(tree, node):
    """The tokens from the root's child to a node of such a list; node 0 is the root."""
    path = []
    while node > 0:
        node, token, *_ = tree[node - 1]
        path.insert(0, token)
    return path


def estimate(memory, context, depth):
    """(token, probability, longest match in the text and in the indexes) of each candidate."""
    past, cues, recent, found, net, index = memory
    found.context[:] = context
    suffixes.wake(index)
    size = evidence.gather(past, cues, recent, found, index, depth)
    acceptance.estimate(net, found, size)
    lengths = found.longest[:size].tolist(), found.corpus_longest[:size].tolist()
    return list(zip(found.tokens[:size].tolist(), net.p[:size].copy(), *lengths, strict=True))


def source_of(longest, indexed):
    if indexed > longest and indexed >= UNMATCHED:
        return INDEXED
    return MATCHED if longest >= UNMATCHED else CUED


def count_leaves(tree):
    return len(set(range(len(tree) + 1)) - {parent for parent, *_ in tree})


def grow_twin(memory, text, cost, nodes=32, leaves=FAR, depth=FAR, fade=1.0, caution=0.0, banned=()):
    """Adds the likeliest candidate until nothing fits, and only then looks which size promised most."""
    tree, reached, pool = [], [np.float32(1)], []
    promises = [1.0]
    while len(reached) < min(nodes, len(cost) - 1):
        node = len(tree)
        path = path_of(tree, node)
        for token, p, longest, indexed in estimate(memory, context_after(text + path), len(path)):
            whole = reached[node] * p * np.float32(fade)
            if whole >= LEAST and token not in banned:
                pool.append((whole, (node, token, len(path) + 1, source_of(longest, indexed))))
        fitting = [one for one in pool if one[1][2] <= depth and count_leaves([*tree, one[1]]) <= leaves]
        pool = sorted(fitting, key=lambda one: -one[0])
        if not pool:
            break
        assert len(pool) == 1 or pool[0][0] > pool[1][0], "the order is not up to chance"
        p, best = pool.pop(0)
        tree.append(best)
        reached.append(p)
        lost = 1 - sum(float(p) for p, (parent, *_) in zip(reached[1:], tree, strict=True) if parent == 0)
        time = cost[len(reached)]
        promises.append(sum(map(float, reached)) / (time + caution * lost * (time - 1)))
    best_size = int(np.argmax(promises))
    return promises[best_size], tree[:best_size]


def random_cost(rng, nodes):
    """Rises, at times by nothing; cost[0] says nothing."""
    steps = rng.exponential(rng.choice([0.02, 0.1, 0.4]), nodes - 1) * (rng.random(nodes - 1) < 0.7)
    return np.concatenate([[np.nan, 1], 1 + np.cumsum(steps)])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 300, N_VOCAB, breaks=0.01) for _ in range(6)]
    return corpora_of(tmp_path_factory.mktemp("indexes"), texts[:2], texts[2:])


def random_case(seed, corpora=None):
    """A memory, a text that ends within it or is its own, and limits."""
    rng = np.random.default_rng(seed)
    index = NO_INDEX if corpora is None else corpora.index
    memory, text = random_memory(rng, n_vocab=N_VOCAB, breaks=0.01, index=index)
    nodes = int(rng.integers(2, 33))
    limits = {
        "cost": random_cost(rng, nodes),
        "nodes": nodes,
        "leaves": int(rng.integers(1, 9)) if rng.random() < 0.5 else FAR,
        "depth": int(rng.integers(1, 7)) if rng.random() < 0.5 else FAR,
        "fade": float(rng.choice([1, 0.9, 0.7])),
        "caution": float(rng.choice([0, 0.5, 2])),
        "banned": set(rng.integers(N_VOCAB, size=int(rng.integers(5))).tolist()),
    }
    text = text if rng.random() < 0.5 else text[: int(rng.integers(1, len(text)))]
    return memory, text[-100:] if text[-1] != BREAK else [*text[:-1][-100:], 0], limits


def stub(rows):
    """A memory in which, after each token of rows, these tokens come with these probabilities, and others never.

    A unit is the log probability in the cue of the last token, 20 higher; what is not in it is 20 lower again.
    """
    rest = 0.1
    shapes = (len(NODE_FEATURES), 1), (len(TOKEN_FEATURES), 1), (1,), (2,)
    net = acceptance.new_net(*(np.zeros(shape, np.float32) for shape in shapes))
    net.token_weights[TOKEN_FEATURES.index("cue (0, 1)")] = 1
    net.token_weights[TOKEN_FEATURES.index("not in cue (0, 1)")] = -20
    net.node_weights[NODE_FEATURES.index("cue (0, 1)")] = 20
    net.out[:] = 1, -20 - np.log(rest)
    memory = new_memory(net)
    for token, row in rows.items():
        assert sum(row.values()) == pytest.approx(1 - rest)
        ids, log_probs = np.full(4, -1, np.int32), np.zeros(4, np.float32)
        ids[: len(row)], log_probs[: len(row)] = list(row), np.log(list(row.values()))
        keyed_cues.put(memory[1], tokens([token]), ids, log_probs, np.int64(0))
    return memory


def test_grow_worked_example():
    memory = stub({1: {2: 0.5, 3: 0.4}})
    cheap, dear = [0, 1, 1.4, 1.5], [0, 1, 1.6, 2]
    both = [(0, 2, 1, CUED), (0, 3, 1, CUED)]
    assert grow(memory, [1], cheap[:3]) == (pytest.approx(1.5 / 1.4, abs=1e-4), both[:1])
    assert grow(memory, [1], cheap) == (pytest.approx(1.9 / 1.5, abs=1e-4), both)
    assert grow(memory, [1], dear) == (1, [])
    assert grow(memory, [1], cheap, caution=1.0) == (pytest.approx(1.9 / 1.55, abs=1e-4), both)


def test_the_likeliest_path_is_next_wherever_it_is():
    memory = stub({1: {2: 0.5, 3: 0.4}, 2: {4: 0.9}, 4: {5: 0.85, 6: 0.05}})
    promise, tree = grow(memory, [1], np.ones(6))
    assert [path_of(tree, node) for node in range(1, 5)] == [[2], [2, 4], [3], [2, 4, 5]]
    assert promise == pytest.approx(1 + 0.5 + 0.45 + 0.4 + 0.45 * 0.85, abs=1e-4)


def test_each_step_of_a_path_fades():
    memory = stub({1: {2: 0.9}, 2: {4: 0.9}})
    assert grow(memory, [1], np.ones(4), fade=0.5)[0] == pytest.approx(1 + 0.45 + 0.45**2, abs=1e-4)


def test_a_size_that_does_not_pay_is_passed_for_a_larger_one_that_does():
    memory = stub({1: {2: 0.9}, 2: {3: 0.9}, 3: {4: 0.9}})
    cost = [0, 1, 2, 2.1, 2.2]
    assert grow(memory, [1], cost[:3]) == (1, [])
    promise, tree = grow(memory, [1], cost)
    assert path_of(tree, 3) == [2, 3, 4]
    assert promise == pytest.approx((1 + 0.9 + 0.81 + 0.729) / 2.2, abs=1e-4)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_the_tree_equals_its_plain_python_twin(seed, indexed, corpora):
    memory, text, limits = random_case(seed, corpora if indexed else None)
    promise, tree = grow(memory, text, **limits)
    expected, twin = grow_twin(memory, text, **limits)
    assert tree == twin
    assert promise == pytest.approx(expected)


def test_random_trees_keep_to_their_limits_and_promise_no_less_than_no_draft():
    sizes = set()
    for seed in range(300):
        memory, text, limits = random_case(seed)
        promise, tree = grow(memory, text, **limits)
        assert promise >= 1
        assert (promise == 1) == (tree == [])
        assert len(tree) + 1 <= limits["nodes"]
        assert count_leaves(tree) <= limits["leaves"]
        assert max((depth for _, _, depth, _ in tree), default=0) <= limits["depth"]
        assert not {token for _, token, *_ in tree} & limits["banned"]
        assert len({tuple(path_of(tree, node)) for node in range(len(tree) + 1)}) == len(tree) + 1
        sizes.add(len(tree))
    assert {0, 1, 2, 4, 8} <= sizes


def test_a_tree_does_not_depend_on_those_that_had_its_room_before():
    tree, pool = layout.new_scratch(64), growth.new_pool(64)
    for seed in range(100):
        memory, text, limits = random_case(seed)
        limits |= {"cost": np.ones(65), "nodes": 64 if seed % 2 else limits["nodes"]}
        assert grow(memory, text, **limits, room=(tree, pool)) == grow(memory, text, **limits)
        assert max(pool.size) <= len(pool.heap)


def test_a_node_as_dear_as_a_forward_is_never_drafted():
    for seed in range(60):
        memory, text, limits = random_case(seed)
        assert grow(memory, text, **(limits | {"cost": np.arange(limits["nodes"] + 1)})) == (1, [])


def test_where_nodes_cost_nothing_all_that_is_likely_is_drafted_or_the_likeliest_of_it():
    full = []
    for seed in range(40):
        memory, text, limits = random_case(seed)
        fade, banned = limits["fade"], limits["banned"]
        promise, tree = grow(memory, text, np.ones(300), nodes=100, fade=fade, banned=banned)
        reached, chances, left_out = [np.float32(1)], [], []
        for node in range(len(tree) + 1):
            if node > 0:
                parent, token, *_ = tree[node - 1]
                reached.append(chances[parent][token])
            path = path_of(tree, node)
            candidates = estimate(memory, context_after(text + path), len(path))
            chances.append({token: reached[node] * p * np.float32(fade) for token, p, *_ in candidates})
            likely = {token for token, p in chances[node].items() if p >= LEAST} - banned
            children = {token for parent, token, *_ in tree if parent == node}
            assert children <= likely
            left_out += [chances[node][token] for token in likely - children]
        full.append(len(tree) == 99)
        assert max(left_out, default=0) <= min(reached) if full[-1] else not left_out
        assert promise == pytest.approx(sum(map(float, reached)))
    assert 0 < sum(full) < 40


# --- set_context, draft, absorb, read ---


def random_tree(rng, nodes):
    """Tokens and parents; half of the nodes go on from the one before, so that some paths are long."""
    parents = [-1] + [node - 1 if rng.random() < 0.9 else int(rng.integers(node)) for node in range(1, nodes)]
    return rng.integers(N_VOCAB, size=nodes).tolist(), parents


@pytest.mark.parametrize("length", [0, 1, 5, CONTEXT, 100])
def test_a_context_is_the_end_of_the_text_and_of_the_path(length):
    rng = np.random.default_rng(length)
    text = random_text(rng, length, N_VOCAB)
    words, parents = random_tree(rng, 200)
    tree = list(zip(parents[1:], words[1:], strict=True))
    context, depths = np.zeros(CONTEXT, np.int32), set()
    for node in range(200):
        growth.set_context(context, tokens(text), tokens(words), tokens(parents), node)
        path = path_of(tree, node)
        assert context.tolist() == context_after(text + path).tolist()
        depths.add(len(path))
    assert max(depths) > CONTEXT


def all_arrays(memory):
    past, cues, recent, _, net, _ = memory
    return [*past[:4], *cues, *recent, net.out]


def assert_same(memory, other):
    for array, expected in zip(all_arrays(memory), all_arrays(other), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-7)


def random_rows(rng, n):
    """Ids and logits [n, 4]; the sixth is unknown."""
    ids, log_probs = (np.array(column) for column in zip(*(random_row(rng, 4, N_VOCAB) for _ in range(n)), strict=True))
    logits = log_probs + np.float32(3)
    if n > 5:
        ids[5], logits[5] = -1, -np.inf
    return ids, logits


def log_softmax(logits):
    out = np.empty_like(logits)
    keyed_cues.log_softmax(logits, out)
    return out


def absorb(memory, text, n, words, parents, path, ids, logits, pool=None):
    nodes, learning = np.array(path, np.int64), (np.float32(0.01), np.float32(0.001))
    tree = tokens(words), tokens(parents), nodes
    growth.absorb(memory, pool or growth.new_pool(4), tokens(text), n, *tree, ids, logits, *learning)


def absorb_slowly(twin, text, n, words, parents, path, ids, logits):
    past, cues, recent, found, net, _ = twin
    tree = list(zip(parents[1:], words[1:], strict=True))
    for at, node in enumerate(path, n):
        size = len(estimate(twin, context_after(text[:at]), 0))
        acceptance.learn(net, found, size, np.int32(text[at]), np.float32(0.01), np.float32(0.001))
        likeliest = np.exp(log_softmax(logits[node])[0])
        evidence.judge(recent, found, size, np.int32(text[at]), likeliest)
        history.append(past, tokens(text[at : at + 1]))
    for node in [*range(len(words)), *path]:
        if ids[node, 0] >= 0:
            context = context_after(text[:n] + path_of(tree, node))
            keyed_cues.put(cues, context, ids[node], log_softmax(logits[node]), past.length[0])
    last = np.exp(log_softmax(logits[path[-1]]))
    recent.last[:] = last[0], last[ids[path[-1]] == text[-1]].sum()


def same_memories(seed=0):
    return [random_memory(np.random.default_rng(seed), n_vocab=N_VOCAB, breaks=0) for _ in range(2)]


def test_each_token_is_judged_before_it_is_history_and_then_every_row_is_noted():
    rng = np.random.default_rng(0)
    (memory, text), (twin, _) = same_memories()
    words, parents = random_tree(rng, 20)
    rows = random_rows(rng, 20)
    path = [0]
    while (below := [node for node in range(20) if parents[node] == path[-1]]) and len(path) < 6:
        path.append(below[0])
    assert len(path) > 2
    text = text + [words[node] for node in path[1:]] + [7]
    absorb(memory, text, 400, words, parents, path, *rows)
    absorb_slowly(twin, text, 400, words, parents, path, *rows)
    assert_same(memory, twin)
    assert (memory[4].out != memory[4].prior).any()


def test_a_long_accepted_path_is_absorbed_token_by_token():
    rng = np.random.default_rng(1)
    (memory, text), (twin, _) = same_memories()
    words, parents = random_text(rng, 12, N_VOCAB, 0), list(range(-1, 11))
    rows, path = random_rows(rng, 12), list(range(9))
    text = text + words[1:9] + [3]
    absorb(memory, text, 400, words, parents, path, *rows)
    absorb_slowly(twin, text, 400, words, parents, path, *rows)
    assert_same(memory, twin)


def test_the_evidence_of_a_lone_root_is_at_hand_and_that_of_a_larger_tree_is_gathered_again():
    for cost in (1 + 0.97 * np.arange(-1, 32), np.ones(33)):
        (memory, text), (twin, _) = same_memories(2)
        tree, pool = layout.new_scratch(32), growth.new_pool(32)
        terms = tokens(SOURCES), cost, np.float32(1), np.float32(0)
        out = np.zeros((4, 32), np.int32)
        n = growth.draft(memory, tokens(text), banning(), terms, tree, pool, (32, 32, 32), out)
        assert (n == 1) == (cost[2] > 1)
        assert (pool.judged[0] == 1) == (n == 1)
        rows = random_rows(np.random.default_rng(3), 1)
        absorb(memory, [*text, 9], 400, text[-1:], [-1], [0], *rows, pool=pool)
        absorb_slowly(twin, [*text, 9], 400, text[-1:], [-1], [0], *rows)
        assert_same(memory, twin)
        assert pool.judged[0] == 0, "used once"


def test_a_row_without_ids_leaves_the_cues_as_they_are():
    (memory, text), (twin, _) = same_memories()
    ids, logits = np.full((1, 4), -1, np.int32), np.full((1, 4), -np.inf, np.float32)
    absorb(memory, [*text, 9], 400, text[-1:], [-1], [0], ids, logits)
    for array, expected in zip(memory[1], twin[1], strict=True):
        np.testing.assert_array_equal(array, expected)


def test_the_rows_of_a_prompt_are_put_under_its_contexts():
    rng = np.random.default_rng(4)
    (memory, text), (twin, _) = same_memories()
    words, (ids, logits) = random_text(rng, 12, N_VOCAB, 0), random_rows(rng, 12)
    growth.read(memory, tokens(text), tokens(words), ids, logits, ids[-1, 0])
    for i in range(12):
        if ids[i, 0] >= 0:
            context = context_after(text + words[: i + 1])
            keyed_cues.put(twin[1], context, ids[i], log_softmax(logits[i]), np.int64(len(text)))
    twin[2].last[:] = np.exp(log_softmax(logits[-1])[0])
    assert_same(memory, twin)
