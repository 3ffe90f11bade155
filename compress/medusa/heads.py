"""Medusa heads as a module to train, and as files."""

import heapq
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from compress.artifact.files import write_atomic
from compress.training.contract import Group
from runtime.checkpoints.medusa import DESCRIPTION, WEIGHTS, Description


class Head(nn.Module):
    """Residual blocks x + SiLU(W x + b), then a matrix: (hidden, hidden), or (V, hidden) of the head's own."""

    def __init__(self, layers: int, output: Tensor) -> None:
        super().__init__()
        size = output.shape[1]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size, size)) for _ in range(layers)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(layers)])
        self.output = nn.Parameter(output)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) to (…, rows of the last matrix)."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + functional.silu(functional.linear(x, weight, bias))
        return functional.linear(x, self.output)


class MedusaHeads(nn.Module):
    """The heads of one target.

    table   (V, hidden): the target's output projection, which is not trained here. With `shared` it follows each head's
            square matrix; otherwise every head begins with a copy of its own.

    They begin as copies of the target's own head: the blocks as zeros, the square matrices as the identity.
    """

    def __init__(self, heads: int, layers: int, table: Tensor, shared: bool) -> None:
        super().__init__()
        self.layers, self.shared = layers, shared
        self.table: Tensor
        self.register_buffer("table", table.detach().float().clone(), persistent=False)
        start = torch.eye(table.shape[1]) if shared else self.table
        self.heads = nn.ModuleList([Head(layers, start.clone()) for _ in range(heads)])

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """For each head its logits (…, V) after the target's hidden states (…, hidden)."""
        found = [head(hidden) for head in self.heads]
        return [functional.linear(x, self.table) for x in found] if self.shared else found

    def groups(self, optimizer: str) -> list[Group]:
        """All parameters for the loop; `optimizer` of the matrices inside the heads."""
        named = dict(self.named_parameters())
        square = [
            parameter for name, parameter in named.items() if "weights" in name or (self.shared and "output" in name)
        ]
        biases = [parameter for name, parameter in named.items() if "biases" in name]
        groups = [
            Group("matrices", square, optimizer="muon" if optimizer == "muon" else "adamw"),
            Group("biases", biases, weight_decay=0.0),
        ]
        if not self.shared:
            groups.append(Group("projections", [p for name, p in named.items() if "output" in name]))
        return groups

    def describe(self, choices: tuple[tuple[int, ...], ...], target: str) -> Description:
        """The description of these heads with a tree, for the target of that digest."""
        size, (vocabulary, _) = len(self.heads), self.table.shape
        return Description(size, self.layers, self.table.shape[1], vocabulary, self.shared, choices, target)

    def save(self, out: Path, description: Description) -> None:
        """Writes medusa.json and medusa.safetensors (bfloat16); equal heads give equal bytes."""
        out.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for number, head in enumerate(self.heads):
            assert isinstance(head, Head)
            for layer, (weight, bias) in enumerate(zip(head.weights, head.biases, strict=True)):
                tensors[f"heads.{number}.layers.{layer}.weight"] = weight
                tensors[f"heads.{number}.layers.{layer}.bias"] = bias
            tensors[f"heads.{number}.{'mix' if self.shared else 'projection'}.weight"] = head.output
        stored = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in tensors.items()}
        write_atomic(out / WEIGHTS, save(stored, metadata={"format": "pt"}))
        write_atomic(out / DESCRIPTION, description.to_json().encode())


Choice = tuple[int, ...]
# Ranks beyond this are never worth a node of a tree of 64.
MOST_RANKS = 64


def token_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
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


def grow_tree(found: Tensor, nodes: int) -> tuple[Choice, ...]:
    """A tree of `nodes` nodes, the most probable ones, in the order of their growth (Cai et al. 2024, section 2.3.3).

    found (n, heads): `token_ranks` on text that the heads were not trained on. A node's probability is how often the
    right tokens went that way in it: what heads get wrong together counts together, which the product of their
    accuracies would miss. The first m choices are the best tree of m nodes, and each comes after its parent and its
    siblings of lower rank. Where too few paths occur, nodes of the same depth as the root's first children are added.

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


def _paths(found: Tensor) -> Counter[Choice]:
    """How often the right tokens are at each path of ranks."""
    counts: Counter[Choice] = Counter()
    for row in found.tolist():
        for depth in range(1, len(row) + 1):
            if row[depth - 1] >= MOST_RANKS:
                break
            counts[tuple(row[:depth])] += 1
    return counts
