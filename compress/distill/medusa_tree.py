"""Which tree Medusa heads draft: grown node by node where the target was most often found. Pure functions."""

import heapq
from collections import Counter

import torch
from torch import Tensor

Choice = tuple[int, ...]
# Ranks beyond this are never worth a node of a tree of 64.
MOST_RANKS = 64


def ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens each head prefers to the right one: 0 where its first choice is right.

    logits (n, heads, V) float; tokens (n, heads) int64. Returns (n, heads) int64. Equals count as preferred where
    their id is lower, as the drafter orders them.
    """
    right = logits.gather(2, tokens.unsqueeze(2))
    lower = torch.arange(logits.shape[2], device=logits.device) < tokens.unsqueeze(2)
    return ((logits > right) | ((logits == right) & lower)).sum(2)


def accuracies(found: Tensor, tops: tuple[int, ...] = (1, 2, 5, 10)) -> dict[str, list[float]]:
    """For each k the share of positions at which the right token is among a head's first k, head by head."""
    return {str(top): (found < top).double().mean(0).tolist() for top in tops}


def grow(found: Tensor, nodes: int) -> tuple[Choice, ...]:
    """A tree of `nodes` nodes, the most probable ones, in the order of their growth (Cai et al. 2024, section 2.3.3).

    found (n, heads): `ranks` on text that the heads were not trained on. A node's probability is how often the right
    tokens went that way in it: what heads get wrong together counts together, which the product of their accuracies
    would miss. The first m choices are the best tree of m nodes, and each comes after its parent and its siblings of
    lower rank. Where too few paths occur, nodes of the same depth as the root's first children are added.

    Raises ValueError without positions, or for less than one node.
    """
    if not len(found) or nodes < 1:
        raise ValueError(f"expected positions and at least one node, found {len(found)} and {nodes}")
    counts = _paths(found)
    # Negative counts: the heap gives the smallest. Ties go to the shallower, then to the lower ranks.
    heap: list[tuple[int, int, Choice]] = [(-counts[(0,)], 1, (0,))]
    chosen: list[Choice] = []
    while heap and len(chosen) < nodes:
        _, depth, path = heapq.heappop(heap)
        chosen.append(path)
        following = [(*path[:-1], path[-1] + 1)] if path[-1] + 1 < MOST_RANKS else []
        if depth < found.shape[1]:
            following.append((*path, 0))
        for one in following:
            heapq.heappush(heap, (-counts[one], len(one), one))
    return tuple(chosen)


def tokens_per_round(found: Tensor, choices: tuple[Choice, ...]) -> float:
    """τ that the tree would have if every position began a round: accepted nodes + 1, on average."""
    counts = _paths(found)
    return 1 + sum(counts[choice] for choice in choices) / len(found)


def _paths(found: Tensor) -> Counter[Choice]:
    """How often the right tokens are at each path of ranks."""
    counts: Counter[Choice] = Counter()
    for row in found.tolist():
        for depth in range(1, len(row) + 1):
            if row[depth - 1] >= MOST_RANKS:
                break
            counts[tuple(row[:depth])] += 1
    return counts
