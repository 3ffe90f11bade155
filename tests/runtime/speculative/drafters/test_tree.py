"""Trees: shapes, growth against its definitions, and the drafter's cache against one that starts anew each time."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.sampling.candidates import Candidates, drawn, ranked
from runtime.sampling.noise import exponential, race
from runtime.sampling.params import Sampling
from runtime.sampling.processors import softmax
from runtime.speculate import Speculator
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from runtime.speculative.drafters.tree_growth import ROOT, DrawnTree, Growing, Growth, RankedTree, ShapedTree, TreeShape
from tests.probabilities import probabilities

Fake = Callable[..., Any]
PLANS = {"static": TreeShape((2, 2, 1, 1)), "dynamic": Growth(depth=3, width=2, branch=3)}
SAMPLINGS = [Sampling(), Sampling(repetition_penalty=1.8), Sampling(temperature=0.9, top_k=20, seed=3)]


def request(tokens: list[int], id_: int = 0, sampling: Sampling | None = None, limit: int = 5000) -> Request:
    return Request(id_, list(tokens), len(tokens), sampling if sampling is not None else Sampling(), limit)


# Shapes and candidates.


def test_shapes() -> None:
    shape = TreeShape((2, 1, 0, 3))
    assert shape.rows == 2
    assert TreeShape.parse("2,1,0,3") == shape
    for children in ((), (0, 1), (1, 1, 1, 1, 1, 0, 1), (-1,), (0,)):
        with pytest.raises(ValueError, match="tree"):
            TreeShape(children)
    for wrong in ("", "two", "1,,1", "1;1", "0", "1,0,1", "-1"):
        with pytest.raises(UserError, match="--tree: expected the number of children"):
            TreeShape.parse(wrong)
    with pytest.raises(ValueError, match="at least 1"):
        Growth(width=0)


weights = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5]), min_size=1, max_size=8).filter(any).map(np.array)


@given(row=weights, branch=st.integers(1, 9))
def test_candidates_are_the_largest_in_order(row: np.ndarray, branch: int) -> None:
    expected = sorted((i for i in range(len(row)) if row[i] > 0), key=lambda i: (-row[i], i))[:branch]
    found = ranked(row, branch)
    assert found.tokens == expected and found.tokens[0] == int(row.argmax())
    assert found.shares == pytest.approx([row[i] / row.sum() for i in expected]) and found.promises == found.shares
    with pytest.raises(ValueError, match="no draws"):
        found.proposal(0)


@given(row=weights, branch=st.integers(1, 9), seed=st.integers(0, 99))
def test_draws_know_their_distributions(row: np.ndarray, branch: int, seed: int) -> None:
    q = row / row.sum()
    found = drawn(q, np.random.default_rng(seed).exponential(size=len(q)), branch)
    assert len(set(found.tokens)) == len(found.tokens) == min(branch, int((q > 0).sum()))
    left = q.copy()
    for rank, token in enumerate(found.tokens):
        own = left / left.sum()
        assert np.allclose(found.proposal(rank), own) and own[token] > 0
        # What is expected of the draw before it is made: not a function of what it gave.
        assert found.promises[rank] == pytest.approx((own * q).sum())
        left[token] = 0


# Growth, on random candidates.


def grow(growing: Growing, seed: int, branch: int = 3) -> dict[int, Candidates]:
    random = np.random.default_rng(seed)
    found: dict[int, Candidates] = {}
    wanted = [ROOT]
    while wanted:
        new = {}
        for node in wanted:
            row = softmax(random.standard_normal(6) * 2, 1.0, 0)
            draws = isinstance(growing, DrawnTree)
            new[node] = drawn(row, random.exponential(size=6), branch) if draws else ranked(row, branch)
        found |= new
        wanted = growing.expand(new)
    return found


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 12), width=st.integers(1, 4), depth=st.integers(1, 4))
def test_the_best_nodes_are_kept(seed: int, budget: int, width: int, depth: int) -> None:
    growing = RankedTree(Growth(9, width, 3), budget, depth)
    found = grow(growing, seed)
    tree, nodes = growing.tree, growing.draft_nodes()
    assert len(nodes) <= budget and nodes == sorted(nodes)
    assert all(tree.parents[node] == ROOT or tree.parents[node] in nodes for node in nodes)
    others = [tree.joints[node] for node in range(len(tree.tokens)) if node not in nodes]
    assert not others or max(others) <= min(tree.joints[node] for node in nodes)
    assert max(tree.depths) <= depth
    for level in range(depth):
        assert sum(tree.depth(node) == level for node in found) <= (1 if level == 0 else width)
    for node in nodes:
        joint, at = 1.0, node
        while at != ROOT:
            joint *= tree.candidates[tree.parents[at]].shares[tree.ranks[at]]
            at = tree.parents[at]
        assert tree.joints[node] == pytest.approx(joint)


def test_a_wide_enough_level_finds_the_best_of_all_trees() -> None:
    """Against all nodes of the whole tree, three children each, four levels."""
    for seed in range(20):
        rows: dict[tuple[int, ...], Candidates] = {}
        random = np.random.default_rng(seed)
        for path in (p for n in range(4) for p in itertools.product(range(3), repeat=n)):
            rows[path] = ranked(softmax(random.standard_normal(3) * 2, 1.0, 0), 3)
        joints: dict[tuple[int, ...], float] = {(): 1.0}
        for path, candidates in rows.items():
            for token, share in zip(candidates.tokens, candidates.shares, strict=True):
                joints[(*path, token)] = joints[path] * share
        growing = RankedTree(Growth(4, 9, 3), 8, 4)
        wanted = [ROOT]
        while wanted:
            wanted = growing.expand({node: rows[tuple(growing.tree.path(node))] for node in wanted})
        expected = sorted((path for path in joints if path), key=lambda path: -joints[path])[:8]
        assert {tuple(growing.tree.path(node)) for node in growing.draft_nodes()} == set(expected)


@given(seed=st.integers(0, 10**6), budget=st.integers(1, 12), depth=st.integers(1, 5))
def test_draws_all_stay_in_the_tree_siblings_in_order(seed: int, budget: int, depth: int) -> None:
    growing = DrawnTree(Growth(4, 3, 3), budget, depth)
    grow(growing, seed)
    tree, nodes = growing.tree, growing.draft_nodes()
    assert nodes == list(range(len(tree.tokens))) and len(nodes) <= budget and max(tree.depths) <= min(depth, 4)
    for parent in tree.candidates:
        ranks = [tree.ranks[node] for node in nodes if tree.parents[node] == parent]
        assert ranks == list(range(len(ranks))) and len(ranks) <= 3
    if depth > 2:
        assert len(nodes) == min(budget, len(nodes)) > 0


def test_a_shape_is_cut_to_its_budget_and_its_depth() -> None:
    shape = TreeShape((2, 2, 1, 1))
    expected = {1: [-1], 2: [-1, -1], 4: [-1, -1, 0, 0], 5: [-1, -1, 0, 0, 1], 6: [-1, -1, 0, 0, 1, 2]}
    for budget, parents in expected.items():
        growing = ShapedTree(shape, budget, 9)
        grow(growing, 0)
        assert growing.tree.parents == parents
    growing = ShapedTree(shape, 9, 2)
    grow(growing, 0)
    assert growing.tree.parents == [-1, -1, 0, 0, 1]
    # A node with fewer candidates than the shape has children.
    growing = ShapedTree(shape, 9, 9)
    assert growing.expand({ROOT: ranked(np.array([1.0]), 3)}) == [0]
    assert growing.expand({0: ranked(np.array([1.0, 2.0]), 3)}) == [1]
    assert growing.tree.parents == [-1, 0, 0]


# The drafter.


def anew(model: Any, plan: Any, one: Request, budget: int, rule: Any) -> Draft:
    fresh = request(one.tokens, sampling=one.sampling)
    fresh.prompt_length = one.prompt_length
    return TreeDrafter(model, plan, rule).propose([fresh], [budget])[0]


def same(one: Draft, other: Draft) -> bool:
    if (one.tokens, one.parents, one.probs is None) != (other.tokens, other.parents, other.probs is None):
        return False
    return one.probs is None or other.probs is None or torch.equal(one.probs, other.probs)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalised", "sampled"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_cache_is_in_step(fake: Fake, plan: str, sampling: Sampling, rule: str) -> None:
    """After any accepted path the draft is the one of a cache that has seen only the text."""
    model = fake(1)
    drafter = TreeDrafter(model, PLANS[plan], rule)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(4)
    texts = [request([5, 6, 7 + i], i, sampling) for i in range(3)]
    fed = []
    for _ in range(8):
        budgets = torch.randint(0, 8, (3,), generator=random).tolist()
        drafts = drafter.propose(texts, budgets)
        for text, draft, budget in zip(texts, drafts, budgets, strict=True):
            assert same(draft, anew(model, PLANS[plan], text, budget, rule))
            assert len(draft.tokens) <= budget and (budget == 0 or draft.tokens)
            leaf = int(torch.randint(-1, len(draft.tokens), (1,), generator=random))
            text.tokens += [*draft.paths[leaf + 1], int(torch.randint(0, 320, (1,), generator=random))]
        fed.append(model.decoder.caches[0].slots[0][:3])
    for text in texts:
        drafter.close(text)
        drafter.close(text)
    assert model.decoder.caches[0].slots == {} and all(tokens == [5, 6, 7] for tokens in fed)


def test_a_stale_cache_would_be_noticed(fake: Fake) -> None:
    model = fake(1, broken=True)
    drafter, text = TreeDrafter(model, PLANS["dynamic"]), request([5, 6, 7])
    equal = []
    for _ in range(4):
        [draft] = drafter.propose([text], [5])
        equal.append(same(draft, anew(model, PLANS["dynamic"], text, 5, "coupled")))
        text.tokens += [draft.tokens[0], 300]
    assert not all(equal)


def test_what_the_text_took_of_the_tree_is_not_fed_again(fake: Fake) -> None:
    model = fake(1)
    drafter, text = TreeDrafter(model, TreeShape((2, 1, 1, 1))), request(list(range(10)))
    [draft] = drafter.propose([text], [5])
    assert draft.parents == [-1, -1, 0, 1, 2]
    # The text; both children of the root; their first grandchild below its parent.
    assert model.decoder.widths == [10, 2, 2]
    text.tokens += [draft.tokens[0], draft.tokens[2], draft.tokens[4], 9]
    drafter.propose([text], [1])
    assert model.decoder.widths[3:] == [2]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "penalised", "sampled"])
def test_a_tree_of_single_children_is_the_model_s_chain(fake: Fake, sampling: Sampling) -> None:
    text = request([5, 6, 7], sampling=sampling)
    [chain] = ModelDrafter(fake(1)).propose([text], [4])
    [tree] = TreeDrafter(fake(1), TreeShape((1, 1, 1, 1))).propose([text], [4])
    assert same(tree, chain)


def test_children_of_coupled_are_ranked_with_the_target_s_noise(fake: Fake) -> None:
    model, sampling = fake(1), Sampling(temperature=1.0, seed=11)
    text = request([5, 6, 7], sampling=sampling)
    for plan in PLANS.values():
        [draft] = TreeDrafter(model, plan).propose([text], [6])
        for node, (before, depth) in enumerate(zip(draft.paths, [-1, *draft.depths], strict=True)):
            own = [draft.tokens[i] for i, parent in enumerate(draft.parents) if parent == node - 1]
            context = tuple([*text.tokens, *before][-3:])
            row = probabilities(torch.tensor(model.decoder.law(context), dtype=torch.float32), sampling).numpy()
            noise = exponential(11, 4 + depth, 320)
            assert own == np.argsort(-row / noise)[: len(own)].tolist()
            assert not own or own[0] == race(row, noise)


def test_positions_and_vocabularies(fake: Fake) -> None:
    for plan in PLANS.values():
        drafter = TreeDrafter(fake(1, max_positions=12), plan)
        deepest = []
        for count in (9, 10, 11, 12, 13, 40):
            [draft] = drafter.propose([request(list(range(1, count + 1)), count)], [6])
            deepest.append(max(draft.depths, default=-1) + 1)
        assert deepest[2:] == [2, 1, 0, 0] and deepest[0] >= 2
    sampling = Sampling(temperature=9.0, seed=1)
    wide = TreeDrafter(fake(1), verify="rejection", vocab_size=400)
    [draft] = wide.propose([request([1, 2], sampling=sampling)], [6])
    assert draft.probs is not None and draft.probs.shape == (6, 400) and draft.probs[:, 320:].sum() == 0
    assert wide.propose([request([1, 350, 2], 1, sampling)], [2])[0].tokens == []
    narrow = TreeDrafter(fake(1), verify="rejection", vocab_size=5)
    [draft] = narrow.propose([request([1, 2], sampling=sampling)], [8])
    assert draft.probs is not None and draft.probs.shape == (8, 5) and max(draft.tokens) < 5
    torch.testing.assert_close(draft.probs.sum(1), torch.ones(8).double())


def test_nodes_have_noise_of_their_own(fake: Fake) -> None:
    """Nodes of one depth, and one position in two rounds: what a tree grew by is not used again."""
    flat = fake(1)
    flat.decoder.law = lambda context: np.zeros(320)
    text = request([5, 6, 7], sampling=Sampling(temperature=1.0, seed=1))
    drafter = TreeDrafter(flat, TreeShape((3, 1, 1, 1)), "rejection")
    [draft] = drafter.propose([text], [6])
    assert len(set(draft.tokens[3:])) == 3
    text.tokens.append(1)
    [later] = drafter.propose([text], [6])
    assert not set(later.tokens[:3]) & set(draft.tokens[3:])
    assert same(later, anew(flat, TreeShape((3, 1, 1, 1)), text, 6, "rejection"))


@pytest.mark.parametrize("plan", PLANS)
def test_the_real_decoder(tiny: Callable[..., Path], plan: str) -> None:
    from runtime import load

    target, draft = load(tiny("llama")), load(tiny("llama", num_hidden_layers=1))
    prompts = ["def f(x):\n    return", "import os\nimport os\nimport"]
    cases: list[dict[str, Any]] = [{}, {"temperature": 0.3, "seed": 2}, {"repetition_penalty": 1.2}]
    for options in cases:
        expected = [Speculator(target).generate([p], 24, stop=(), **options)[0].tokens for p in prompts]
        for model in (draft, target):
            drafter = TreeDrafter(model, PLANS[plan])
            results = Speculator(target, drafter, draft_length=6).generate(prompts, 24, stop=(), **options)
            assert [result.tokens for result in results] == expected
            if model is target:  # the greedy path, or the sample, is in every tree
                metrics = total([result.metrics for result in results])
                assert metrics.tokens_per_round is not None and metrics.tokens_per_round > 2.5
    result = Speculator(target, TreeDrafter(draft, PLANS[plan], "rejection"), 6, "rejection").generate(
        prompts, 24, stop=(), temperature=1.0
    )
    assert [len(one.tokens) for one in result] == [24, 24]


def test_a_foreign_model_takes_no_trees(tiny: Callable[..., Path]) -> None:
    from runtime import load

    target = load(tiny("gpt2"))
    with pytest.raises(UserError, match="GPT2LMHeadModel runs through transformers, which takes chains"):
        Speculator(target, TreeDrafter(load(tiny("llama"))), 6).generate(["def f(x):"], 8, stop=())
