"""Token trees from a draft model: several continuations, verified in one forward of the target."""

from collections.abc import Sequence
from typing import assert_never

import numpy as np
import torch
from torch import Tensor

from runtime.device_rounds import Asked, RanksRows, chosen_there
from runtime.drafters import Draft, Outcome, Request
from runtime.drafters.candidates import Candidates, drawn, ranked, softmax
from runtime.drafters.growth import ROOT, DrawnTree, Growing, Growth, RankedTree, ShapedTree, Tree, TreeShape
from runtime.drafters.model import HasDecoder
from runtime.drafters.tree_cache import TreeCache
from runtime.noise import Stream, uniforms
from runtime.sampling import Distributions, Logits, finite_choices, host, not_finite
from runtime.verify import Rule


class TreeDrafter:
    """Drafts trees with a model that shares the target's tokenizer.

    model       the draft.
    plan        a `TreeShape`, the tree's shape as data; or a `Growth`, trees that grow where they are most probable.
    verify      the rule that will judge. Requests that do not sample, and `typical`: a node's children are its most
                probable tokens. `coupled`: those of highest probability with the target's noise at that position; the
                first is what the draft itself would sample. `rejection`: draws without replacement, with noise of
                their own; each comes with the distribution that it was really drawn from.
    vocab_size  the target's number of logits, where it differs from the draft's (padded embeddings): the draft proposes
                nothing beyond it, and its distributions have that many columns.

    A level of the tree is one forward of the draft. The budget counts nodes.
    """

    name = "tree"

    def __init__(
        self,
        model: HasDecoder,
        plan: TreeShape | Growth = Growth(),  # noqa: B008 (frozen)
        verify: Rule = "coupled",
        vocab_size: int | None = None,
    ) -> None:
        self.plan = plan
        self._decoder = model.decoder
        self._rule: Rule = verify
        self._vocab_size = vocab_size if vocab_size is not None else model.decoder.vocab_size
        self._cache = TreeCache(model.decoder, plan.rows)
        self._branch = max(plan.children) if isinstance(plan, TreeShape) else plan.branch

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One tree per request: one forward for all missing tokens of all texts, then one per level of all trees."""
        begun = [self._begin(request, budget) for request, budget in zip(requests, budgets, strict=True)]
        growing = [(request, tree) for request, tree in zip(requests, begun, strict=True) if tree is not None]
        wanted = [[ROOT] for _ in growing]
        if growing:
            logits = self._cache.feed_texts([request for request, _ in growing])
        while growing:
            level = [
                (request, growth.tree, node)
                for (request, growth), nodes in zip(growing, wanted, strict=True)
                for node in nodes
            ]
            children = iter(self._children(level, logits))
            left = []
            for (request, growth), nodes in zip(growing, wanted, strict=True):
                found = dict(zip(nodes, children, strict=False))
                left.append((request, growth, growth.expand(found)))
            growing = [(request, growth) for request, growth, nodes in left if nodes]
            wanted = [nodes for _, _, nodes in left if nodes]
            if growing:
                trees = [growth.tree for _, growth in growing]
                logits = self._cache.feed_trees([request for request, _ in growing], trees, wanted)
        return [Draft() if tree is None else self._draft(tree) for tree in begun]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: the next `propose` compares the cache with the texts themselves."""

    def close(self, request: Request) -> None:
        """Frees the request's cache."""
        self._cache.close(request)

    def _begin(self, request: Request, budget: int) -> Growing | None:
        """An empty tree; None without a budget, where the draft's positions end, or for a token it does not know."""
        # The text and all nodes but the deepest go through the draft.
        depth = min(budget, self._decoder.max_positions - len(request.tokens) + 1)
        if depth < 1 or max(request.tokens[self._cache.fed(request) :], default=0) >= self._decoder.vocab_size:
            return None
        if isinstance(self.plan, TreeShape):
            return ShapedTree(self.plan, budget, depth)
        drawing = self._rule == "rejection" and not request.sampling.greedy
        return (DrawnTree if drawing else RankedTree)(self.plan, budget, depth)

    def _children(self, level: Sequence[tuple[Request, Tree, int]], logits: Tensor) -> list[Candidates]:
        """The children of a level's nodes, after logits (nodes, V). Reads the device once, where they lie on one.

        Raises UserError where a row's logits are no numbers.
        """
        there = all(chosen_there(request.sampling, self._rule) for request, _, _ in level)
        if isinstance(self._decoder, RanksRows) and there:
            asked = [Asked(request.sampling, len(request.tokens) + tree.depth(node)) for request, tree, node in level]
            found = [*self._decoder.candidates(logits, asked, self._branch, self._vocab_size)]
            if None in found:
                raise not_finite("draft")
            return [candidates for candidates in found if candidates is not None]
        rows = host(logits.cpu())
        finite_choices(rows, "draft")
        return [self._candidates(*one, rows[i]) for i, one in enumerate(level)]

    def _candidates(self, request: Request, tree: Tree, node: int, logits: Logits) -> Candidates:
        """The node's children, after logits (V,)."""
        sampling, path = request.sampling, tree.path(node)
        known = logits[: self._vocab_size]
        rows = Distributions(known, sampling, request.tokens, [path], request.prompt_length, request.stop_tokens)
        if sampling.greedy:
            return ranked(softmax(rows.scores(0)), self._branch)
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
        tree, nodes = growth.tree, growth.chosen()
        number = {node: i for i, node in enumerate(nodes)} | {ROOT: -1}
        return Draft(
            [tree.tokens[node] for node in nodes], [number[tree.parents[node]] for node in nodes], self._probs(growth)
        )

    def _probs(self, growth: Growing) -> Tensor | None:
        """The distributions as (n, vocab_size), with zeros where the draft has fewer logits."""
        tree, nodes = growth.tree, growth.chosen()
        if not nodes or tree.candidates[ROOT].row is None:
            return None
        out = np.zeros((len(nodes), self._vocab_size))
        for i, node in enumerate(nodes):
            row = tree.proposal(node)
            out[i, : len(row)] = row
        return torch.from_numpy(out)
