"""How a token tree grows, level by level: in a given shape, or where the draft's probabilities lead. Pure; no model.

Under `rejection` a child is a random draw, and whether it is in the tree must not depend on what it turned out to be:
its distribution would not be q any more, and the rule's output not the target's. `DrawnTree` says how it keeps to that.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from runtime.errors import UserError
from runtime.sampling.candidates import Candidates, Row

# The node that all trees begin at: the text's last token.
ROOT = -1


@dataclass(frozen=True)
class TreeShape:
    """A tree given as data: the number of children of the root and of each node, breadth first.

    Zeros at the end may be left out: (2, 1) is a root with two children, of which the first has one. A node's children
    are its draft's most probable tokens, or so many draws. Where the budget is smaller than the tree, its first nodes
    are taken.
    Raises ValueError for an empty tree, a negative number, or one for a node that there is not.
    """

    children: tuple[int, ...]

    def __post_init__(self) -> None:
        known = 1
        for node, count in enumerate(self.children):
            if count < 0 or node >= known:
                raise ValueError(f"children of node {node} of a tree of {known} nodes: {self.children}")
            known += count
        if known == 1:
            raise ValueError(f"a tree needs at least one node below its root, found {self.children}")

    @staticmethod
    def parse(text: str) -> "TreeShape":
        """The tree of "2,2,1,1". Raises UserError for what is no tree."""
        try:
            return TreeShape(tuple(int(count) for count in text.split(",")))
        except ValueError as error:
            raise UserError(
                f"--tree: expected the number of children of each node, breadth first, such as 2,2,1,1, found {text!r}"
                f" ({error}); correct it."
            ) from error

    @property
    def rows(self) -> int:
        """The most rows of a tree in the draft's cache: nodes that have children."""
        return sum(count > 0 for count in self.children[1:])


@dataclass(frozen=True)
class Growth:
    """A tree that grows where it is most probable.

    depth   the most forwards of the draft, and nodes on a path.
    width   nodes whose children each of them finds.
    branch  the most children of a node.
    Raises ValueError for a number below 1.
    """

    depth: int = 5
    width: int = 4
    branch: int = 4

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.branch) < 1:
            raise ValueError(f"depth, width and branch must be at least 1, found {self}")

    @property
    def rows(self) -> int:
        """The most rows of a tree in the draft's cache."""
        return self.width * (self.depth - 1)


@dataclass
class Tree:
    """Nodes in order of their making, parents first; node −1 is the root."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    joints: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    candidates: dict[int, Candidates] = field(default_factory=dict)

    def take(self, parent: int, rank: int) -> int:
        """Adds the candidate of that rank as a child of a node; returns its number."""
        found = self.candidates[parent]
        self.tokens.append(found.tokens[rank])
        self.parents.append(parent)
        self.ranks.append(rank)
        self.depths.append(self.depth(parent) + 1)
        self.joints.append(self.joint(parent) * found.shares[rank])
        return len(self.tokens) - 1

    def depth(self, node: int) -> int:
        """Nodes on the path down to this one, without the root."""
        return 0 if node == ROOT else self.depths[node]

    def joint(self, node: int) -> float:
        """Product of the shares on the path: how probable the draft thinks that the text takes it."""
        return 1.0 if node == ROOT else self.joints[node]

    def best(self, nodes: Iterable[int]) -> list[int]:
        """The nodes by joint probability, the most probable first, of equals the older."""
        return sorted(nodes, key=lambda node: (-self.joints[node], node))

    def path(self, node: int) -> list[int]:
        """The tokens from the root down to this node."""
        out: list[int] = []
        while node != ROOT:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]

    def proposal(self, node: int) -> Row:
        """(V,) the distribution that the node was drawn from."""
        return self.candidates[self.parents[node]].proposal(self.ranks[node])


class Growing(ABC):
    """A tree in the making, of at most `budget` nodes: begins with the candidates of the root."""

    def __init__(self, budget: int) -> None:
        self.tree = Tree()
        self._budget = budget

    @abstractmethod
    def expand(self, found: Mapping[int, Candidates]) -> list[int]:
        """Takes the candidates of the nodes that were asked for; the nodes whose candidates are needed next, or []."""

    def draft_nodes(self) -> list[int]:
        """The nodes that the draft consists of, parents first and siblings in order."""
        return list(range(len(self.tree.tokens)))


class ShapedTree(Growing):
    """Grows in a given shape, cut to its first `budget` nodes and to `depth` levels.

    A node that has fewer candidates than the shape asks for has fewer children.
    """

    def __init__(self, shape: TreeShape, budget: int, depth: int) -> None:
        super().__init__(budget)
        self._counts = shape.children
        self._first = list(accumulate(shape.children, initial=1))  # number of each node's first child; the root is 0
        self._depth = depth
        self._numbers = {ROOT: 0}

    def expand(self, found: Mapping[int, Candidates]) -> list[int]:
        self.tree.candidates |= found
        wanted = []
        for node in sorted(found, key=lambda node: self._numbers[node]):
            number = self._numbers[node]
            for rank in range(min(self._counts[number], len(found[node].tokens))):
                if self._first[number] + rank <= self._budget:
                    child = self.tree.take(node, rank)
                    self._numbers[child] = self._first[number] + rank
                    wanted += [child] if self._has_children(child) else []
        return wanted

    def _has_children(self, node: int) -> bool:
        number = self._numbers[node]
        if number >= len(self._counts) or self.tree.depth(node) >= self._depth:
            return False
        return self._counts[number] > 0 and self._first[number] <= self._budget


class RankedTree(Growing):
    """EAGLE-2's growth (2406.16858) for proposals that are no draws.

    Each level expands the most probable of the new nodes; at the end the `budget` nodes of highest joint probability
    are kept. A node outside of those has no descendants among them, so it is not expanded.
    """

    def __init__(self, growth: Growth, budget: int, depth: int) -> None:
        super().__init__(budget)
        self._width, self._depth = growth.width, min(depth, growth.depth)

    def expand(self, found: Mapping[int, Candidates]) -> list[int]:
        self.tree.candidates |= found
        first = len(self.tree.tokens)
        for node, candidates in found.items():
            for rank in range(len(candidates.tokens)):
                self.tree.take(node, rank)
        new = [node for node in self._best() if node >= first and self.tree.depths[node] < self._depth]
        return sorted(new[: self._width])

    def draft_nodes(self) -> list[int]:
        """The best nodes. A child is never before its parent: its joint probability is no higher, its number is."""
        return sorted(self._best())

    def _best(self) -> list[int]:
        return self.tree.best(range(len(self.tree.tokens)))[: self._budget]


class DrawnTree(Growing):
    """Growth for draws: the next draw is made where it promises most, and every draw stays in the tree.

    A draw's promise is the joint probability that its token will have, expected before the draw. So each decision to
    draw depends on earlier draws alone, a drawn token is distributed as its node says whatever has been decided, and
    `rejection` stays exact. Throwing away the least probable tokens of a larger tree, as RankedTree does, would not be.
    The budget is spread over the levels: a level's draws may also be further siblings higher up.
    """

    def __init__(self, growth: Growth, budget: int, depth: int) -> None:
        super().__init__(budget)
        self._width, self._left = growth.width, min(depth, growth.depth, budget)
        # The next draw at each node that has candidates: highest promise first, then the older node.
        self._draws: list[tuple[float, int, int]] = []

    def expand(self, found: Mapping[int, Candidates]) -> list[int]:
        self.tree.candidates |= found
        for node in found:
            self._offer(node, 0)
        new = []
        for _ in range(-(-(self._budget - len(self.tree.tokens)) // self._left)):
            if self._draws:
                _, node, rank = heapq.heappop(self._draws)
                new.append(self.tree.take(node, rank))
                self._offer(node, rank + 1)
        self._left -= 1
        if self._left == 0:
            return []
        return sorted(self.tree.best(new)[: self._width])

    def _offer(self, node: int, rank: int) -> None:
        promises = self.tree.candidates[node].promises
        if rank < len(promises):
            heapq.heappush(self._draws, (-self.tree.joint(node) * promises[rank], node, rank))
