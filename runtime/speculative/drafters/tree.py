"""Token trees from a draft model: several continuations, verified in one forward of the target.

The trees grow (tree_growth.py) from the draft's logits. A row sees all that its request's cache held before the
forward, so a tree never stays there: each level is fed with its ancestors, which costs rows but no forwards. Of the
last tree, what the text took of it is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

import numpy as np
from torch import Tensor

from runtime.contract import HasDecoder, Rows, integers
from runtime.model.on_device import DeviceRounds, RowSampling
from runtime.sampling.candidates import Candidates, drawn, ranked
from runtime.sampling.distribution import Distributions, Logits, argmax_tokens, host, not_finite
from runtime.sampling.noise import Stream, uniforms
from runtime.sampling.processors import softmax
from runtime.speculative.draft import Draft, Request
from runtime.speculative.drafters.model import DraftModel, prefill, stacked
from runtime.speculative.drafters.tree_growth import (
    ROOT,
    DrawnTree,
    Growing,
    Growth,
    RankedTree,
    ShapedTree,
    Tree,
    TreeShape,
)
from runtime.speculative.verify import Rule, sampled_on_device


@dataclass
class _Text:
    """A request's place in the cache: the first `fed` tokens of its text, then the rows of a tree.

    `branches` are the tree's (token, parent), parents as indices among them and −1 for the text's last token.
    """

    handle: int
    fed: int = 0
    branches: list[tuple[int, int]] = field(default_factory=list)


def _taken(branches: Sequence[tuple[int, int]], tokens: Sequence[int]) -> list[int]:
    """The path in the tree, from the root on, that the tokens follow."""
    path: list[int] = []
    for token in tokens:
        node = path[-1] if path else -1
        child = next((i for i, branch in enumerate(branches) if branch == (token, node)), None)
        if child is None:
            break
        path.append(child)
    return path


def _with_ancestors(tree: Tree, nodes: Sequence[int]) -> list[int]:
    """The nodes and all above them, parents first."""
    needed: set[int] = set()
    for start in nodes:
        node = start
        while node != ROOT and node not in needed:
            needed.add(node)
            node = tree.parents[node]
    return sorted(needed)


class TreeDrafter(DraftModel[_Text]):
    """Drafts trees with a model that shares the target's tokenizer; arguments as for `DraftModel`, and

    plan  a `TreeShape`, the tree's shape as data; or a `Growth`, trees that grow where they are most probable.

    Requests that do not sample, and `typical`: a node's children are its most probable tokens. `coupled`: those of
    highest probability with the target's noise at that position; the first is what the draft itself would sample.
    `rejection`: draws without replacement, with noise of their own; each comes with the distribution that it was really
    drawn from. A level of the tree is one forward of the draft. The budget counts nodes.
    """

    name = "tree"

    def __init__(
        self,
        model: HasDecoder,
        plan: TreeShape | Growth = Growth(),  # noqa: B008 (frozen)
        verify: Rule = "coupled",
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(model, verify, vocab_size)
        self.plan = plan
        self._on_device = model.decoder if isinstance(model.decoder, DeviceRounds) else None
        self._branch = max(plan.children) if isinstance(plan, TreeShape) else plan.branch

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One tree per request: one forward for all missing tokens of all texts, then one per level of all trees."""
        begun = [self._begin(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        growing = [(request, tree, [ROOT]) for request, tree in zip(requests, begun, strict=True) if tree is not None]
        if growing:
            logits = self._feed_texts([request for request, *_ in growing])
        while growing:
            level = [(request, growth.tree, node) for request, growth, nodes in growing for node in nodes]
            children = iter(self._children(level, logits))
            wanted = [growth.expand(dict(zip(nodes, children, strict=False))) for _, growth, nodes in growing]
            growing = [(*one[:2], nodes) for one, nodes in zip(growing, wanted, strict=True) if nodes]
            if growing:
                logits = self._feed_trees(growing)
        return [Draft() if tree is None else self._draft(tree) for tree in begun]

    def _begin(self, request: Request, budget: int) -> Growing | None:
        """An empty tree; None without a budget, where the draft's positions end, or for a token it does not know."""
        depth = self._affordable(request, budget, self._texts[request.id].fed if request.id in self._texts else 0)
        if depth < 1:
            return None
        if isinstance(self.plan, TreeShape):
            return ShapedTree(self.plan, budget, depth)
        drawing = self._rule == "rejection" and not request.sampling.greedy
        return (DrawnTree if drawing else RankedTree)(self.plan, budget, depth)

    def _feed_texts(self, requests: Sequence[Request]) -> Tensor:
        """Feeds what is missing of each text, its last token in any case; logits (requests, V) after them."""
        tokens: list[int] = []
        spans, ends = [], []
        for request in requests:
            text = self._follow(request)
            text.fed = prefill(self._decoder, self._cache, text.handle, request.tokens, text.fed)
            spans.append((text.handle, text.fed, len(request.tokens) - text.fed))
            tokens += request.tokens[text.fed :]
            ends.append(len(tokens) - 1)
            text.fed = len(request.tokens)
        return self._decoder.forward(integers(tokens), Rows.chains(spans), self._cache, integers(ends)).logits

    def _feed_trees(self, growing: Sequence[tuple[Request, Growing, list[int]]]) -> Tensor:
        """Feeds the nodes that each tree wants behind its text, which is fed; logits (nodes, V), tree by tree."""
        tokens: list[int] = []
        handles: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        at: list[int] = []
        for request, growth, nodes in growing:
            text, tree, base = self._texts[request.id], growth.tree, len(tokens)
            self._cache.truncate(text.handle, text.fed)
            needed = _with_ancestors(tree, nodes)
            places = {node: i for i, node in enumerate(needed)} | {ROOT: -1}
            text.branches = [(tree.tokens[node], places[tree.parents[node]]) for node in needed]
            tokens += [token for token, _ in text.branches]
            handles += [text.handle] * len(needed)
            positions += [text.fed - 1 + tree.depth(node) for node in needed]
            parents += [base + parent if parent >= 0 else -1 for _, parent in text.branches]
            at += [base + places[node] for node in nodes]
        rows = Rows(integers(handles), integers(positions), integers(parents))
        return self._decoder.forward(integers(tokens), rows, self._cache, integers(at)).logits

    def _follow(self, request: Request) -> _Text:
        """Rolls the request's cache back to its text without the last token: what the text took of the tree stays."""
        text = self._texts.get(request.id)
        if text is None:
            text = self._texts[request.id] = _Text(self._cache.open(self._capacity(request) + self.plan.rows))
        # The text's last token is fed in any case: the draft starts from its logits.
        text.fed = min(text.fed, len(request.tokens) - 1)
        path = _taken(text.branches, request.tokens[text.fed : -1])
        if path == list(range(len(path))):
            self._cache.truncate(text.handle, text.fed + len(path))
        else:
            self._cache.keep(text.handle, text.fed, path)
        text.fed += len(path)
        text.branches = []
        return text

    def _children(self, level: Sequence[tuple[Request, Tree, int]], logits: Tensor) -> list[Candidates]:
        """The children of a level's nodes, after logits (nodes, V). Reads the device once, where they lie on one.

        Raises UserError where a row's logits are no numbers.
        """
        there = all(sampled_on_device(request.sampling, self._rule) for request, _, _ in level)
        if self._on_device is not None and there:
            asked = [
                RowSampling(request.sampling, len(request.tokens) + tree.depth(node)) for request, tree, node in level
            ]
            found = [*self._on_device.candidates(logits, asked, self._branch, self._vocab_size)]
            if None in found:
                raise not_finite("draft")
            return [candidates for candidates in found if candidates is not None]
        rows = host(logits.cpu())
        argmax_tokens(rows, "draft")
        return [self._candidates(*one, rows[i]) for i, one in enumerate(level)]

    def _candidates(self, request: Request, tree: Tree, node: int, logits: Logits) -> Candidates:
        """The node's children, after logits (V,)."""
        sampling, path = request.sampling, tree.path(node)
        known = logits[: self._vocab_size]
        rows = Distributions(known, sampling, request.tokens, [path], request.prompt_length, request.stop_tokens)
        if sampling.greedy:
            return ranked(softmax(rows.scores(0), 1.0, 0), self._branch)
        row = rows.array(0)
        match self._rule:
            case "coupled":
                position = len(request.tokens) + len(path)
                return ranked(row / request.noise.exponential(sampling.seed, position, len(row)), self._branch)
            case "rejection":
                # Every node of every round has noise of its own: what a tree grew by is never used again.
                fresh = uniforms(sampling.seed, len(request.tokens), Stream.DRAFT, len(row), lane=node + 1)
                return drawn(row, -np.log(fresh), self._branch)
            case "typical":
                return ranked(row, self._branch)
        assert_never(self._rule)

    def _draft(self, growth: Growing) -> Draft:
        tree, nodes = growth.tree, growth.draft_nodes()
        number = {node: i for i, node in enumerate(nodes)} | {ROOT: -1}
        drawn_from = [] if tree.candidates[ROOT].row is None else [tree.proposal(node) for node in nodes]
        return Draft(
            [tree.tokens[node] for node in nodes],
            [number[tree.parents[node]] for node in nodes],
            stacked(drawn_from, self._vocab_size),
        )
