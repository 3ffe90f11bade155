"""The tree of what heads draft, against all trees of its size, and what heads learn from."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings as rules
from hypothesis import strategies as st

from compress.errors import UserError
from compress.medusa import frozen, own_text
from compress.medusa.heads import MOST_RANKS, accuracies, grow_tree, token_ranks
from runtime.checkpoints.medusa import Description


def tokens_per_round(found: torch.Tensor, choices: tuple[tuple[int, ...], ...]) -> float:
    """τ that the tree would have if every position began a round: accepted nodes + 1, on average."""
    accepted = sum(tuple(row[: len(choice)]) == choice for row in found.tolist() for choice in choices)
    return 1 + accepted / len(found)


def ranks_of(seed: int, n: int = 400, heads: int = 3) -> torch.Tensor:
    """(n, heads): small ranks are likelier, and the heads are right together."""
    random = np.random.default_rng(seed)
    hard = random.exponential(1.0, (n, 1))
    return torch.from_numpy(np.minimum(random.exponential(1.0, (n, heads)) * (1 + 2 * hard), 200).astype(np.int64))


def accepted(row: Sequence[int], tree: set[tuple[int, ...]]) -> int:
    depth = 0
    while depth < len(row) and tuple(row[: depth + 1]) in tree:
        depth += 1
    return depth


@rules(max_examples=30, deadline=None)
@drawn(st.integers(0, 10**6), st.integers(1, 40))
def test_a_tree_of_any_size_is_sound_and_its_value_is_counted(seed: int, nodes: int) -> None:
    found = ranks_of(seed)
    choices = grow_tree(found, nodes)
    assert len(choices) == nodes
    Description(3, 1, 4, 1000, True, choices, "")  # refuses what is no tree in order
    mean = np.mean([accepted(row, set(choices)) for row in found.tolist()])
    assert tokens_per_round(found, choices) == pytest.approx(1 + mean)
    assert grow_tree(found, nodes + 5)[:nodes] == choices


def test_no_tree_of_its_size_is_better() -> None:
    """All trees of five nodes of two heads and three ranks."""
    found = ranks_of(3, heads=2)
    found[found >= 3] = MOST_RANKS
    paths = [path for depth in (1, 2) for path in product(range(3), repeat=depth)]
    values = []
    for bits in range(1 << len(paths)):
        tree = [path for i, path in enumerate(paths) if bits >> i & 1]
        known = set(tree) | {()}
        ordered = all((*path[:-1], path[-1] - 1) in known for path in tree if path[-1])
        if len(tree) == 5 and ordered and all(path[:-1] in known for path in tree):
            values.append(tokens_per_round(found, tuple(tree)))
    assert len(values) > 6
    assert tokens_per_round(found, grow_tree(found, 5)) == pytest.approx(max(values))
    assert max(values) > min(values)


def test_ranks_and_accuracies() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, 3.0]], [[0.0, 0.0, 0.0, 0.0]]])
    assert token_ranks(logits, torch.tensor([[3], [0]])).tolist() == [[1], [0]]
    assert token_ranks(logits, torch.tensor([[0], [3]])).tolist() == [[3], [3]]
    random = torch.randn(50, 2, 30, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, 30, (50, 2), generator=torch.Generator().manual_seed(1))
    found = token_ranks(random, tokens)
    for i, k in product(range(50), range(2)):
        assert found[i, k] == random[i, k].argsort(descending=True).tolist().index(tokens[i, k])
    shares = accuracies(found, (1, 30))
    assert shares["30"] == [1.0, 1.0] and shares["1"] == (found == 0).double().mean(0).tolist()
    with pytest.raises(ValueError, match="at least one node"):
        grow_tree(found, 0)
    with pytest.raises(ValueError, match="expected positions"):
        grow_tree(found[:0], 3)


def test_pairs_stand_where_the_heads_will_be_asked() -> None:
    tokens = torch.arange(20).view(2, 10)
    states = tokens.unsqueeze(2).float()
    hidden, targets = frozen.pairs(tokens, states, first=3, heads=2)
    # State i gives token i + 1 by the target's own head; head 0 is to say token i + 2.
    assert hidden.flatten().tolist() == [3, 4, 5, 6, 13, 14, 15, 16]
    assert targets.tolist() == [[int(i) + 2, int(i) + 3] for i in hidden.flatten()]


def test_the_loss_is_the_weighted_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(7, 11, generator=generator, dtype=torch.float64) for _ in range(3)]
    targets = torch.randint(0, 11, (7, 3), generator=generator)
    value, each = frozen.heads_loss(logits, targets, 0.8)
    expected = [-row.log_softmax(-1)[torch.arange(7), targets[:, k]].mean() for k, row in enumerate(logits)]
    assert torch.allclose(torch.stack(each).double(), torch.stack(expected), atol=1e-6)
    mean = (expected[0] + 0.8 * expected[1] + 0.64 * expected[2]) / (1 + 0.8 + 0.64)
    assert float(value) == pytest.approx(float(mean), abs=1e-6)


def test_windows_are_cut_without_overlap() -> None:
    stream = np.arange(103, dtype=np.uint16)
    found = own_text.cut(stream, 10, 99, 0, "it")
    assert sorted(found[:, 0].tolist()) == list(range(0, 100, 10))
    assert all(row.tolist() == list(range(row[0], row[0] + 10)) for row in found)
    assert len(own_text.cut(stream, 10, 4, 0, "it")) == 4
    assert not torch.equal(own_text.cut(stream, 10, 4, 0, "it"), own_text.cut(stream, 10, 4, 1, "it"))
    rows = own_text.cut(torch.arange(46).view(2, 23), 10, 99, 0, "it")
    assert sorted(rows[:, 0].tolist()) == [0, 10, 23, 33]
    with pytest.raises(UserError, match="it is too short: expected one window of 200 tokens at least, found 103"):
        own_text.cut(stream, 200, 4, 0, "it")
