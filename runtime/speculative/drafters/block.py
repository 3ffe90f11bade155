"""A small network on the target's hidden states drafts a tree at once, and says which of its tokens are worth a row."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.kernels.native_linear import NativeLinear
from runtime.sampling.candidates import Candidates, ranked
from runtime.sampling.distribution import Distributions, argmax_tokens
from runtime.speculative.draft import Draft, Outcome, Request, TakenStates
from runtime.speculative.drafters.block_native import Asked, Growth, NativeBlocks, NativeText
from runtime.speculative.drafters.block_network import BlockNetwork, Floats, Places, Seen
from runtime.speculative.drafters.tree_growth import ROOT, Tree
from runtime.speculative.verify import Rule

# A token that the text comes to with a lower probability is not worth its row where eight rows cost a fifth more than
# one, which is what large models are like.
WORTH = 0.03
# Where a short head gives a draft's first token a lower probability the target's own head is asked for it: there the
# token may be a rare one.
UNSURE = 0.15
# Tokens of a place that the memory chooses among: so many, or a few more, that its row alone finds most probable.
_CONSIDERED = 256


@dataclass
class _Text:
    """What is known of one text.

    end     where the next state belongs: those before it were read as far as they came, the last `window` of them or
            fewer are kept.
    unread  states that came since the last draft, with the first one's place and their number; `waiting` together.
    plain   of each layer keys and values (2, n, kv_heads, head_dim) of the tokens up to the unread ones, and the last
            fused state; `native` the same for native kernels.
    """

    end: int
    unread: deque[tuple[Tensor, int, int]] = field(default_factory=deque)
    waiting: int = 0
    plain: tuple[list[Tensor], Tensor] | None = None
    native: NativeText | None = None

    def take(self, window: int) -> tuple[Tensor, Sequence[int]] | None:
        """The unread states that can be seen, (n, taps · hidden), and their places, which are read then; or None."""
        if not self.unread:
            return None
        places: Sequence[int]
        if len(self.unread) == 1:
            found, first, count = self.unread[0]
            places = range(first, first + count)
        else:
            found = torch.cat([states for states, _, _ in self.unread])[-window:]
            places = [place for _, first, count in self.unread for place in range(first, first + count)][-window:]
        self.unread.clear()
        self.waiting = 0
        return found, places


class BlockDrafter:
    """Drafts from the target's states of the tokens before the last one, and that token.

    network  what `load_network` returned.
    verify   the rule that will verify. `coupled`: children are those of highest probability with the target's noise.
             No draws in any case, so that Draft.probs is None.
    branch   the most children of a node; 1: chains.

    The tree grows where it is most probable, and ends where no token is worth a row (WeighsRows); the budget counts
    nodes. A request whose states have not come (its text was in the cache) gets an empty draft. States are read when a
    draft is asked for, the last `window` of them; some of rounds without drafts may be missing among them.
    """

    name = "block"

    def __init__(self, network: BlockNetwork, verify: Rule = "coupled", branch: int = 4) -> None:
        self._network, self._branch = network, branch
        self._native = NativeBlocks(network) if isinstance(network.fuse, NativeLinear) else None
        self._rule: Rule = verify
        self.worth = WORTH
        self._texts: dict[int, _Text] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        """See StateReader."""
        return self._network.about.taps

    def read(self, taken: Sequence[TakenStates]) -> None:
        """Keeps the states that a draft may come to see."""
        window = self._network.about.window
        for part in taken:
            text = self._texts.get(part.request.id)
            # Others than the last tokens are of no use to it: what it reads behind so long a gap begins anew.
            if text is None or not 0 <= part.start - text.end < window:
                text = self._texts[part.request.id] = _Text(part.start)
            # Sizes are counted: to ask a tensor for its own takes a microsecond.
            count = part.states.shape[0]
            text.end, kept = part.start + count, min(count, window)
            # The rest of a long piece is not to be kept in memory.
            states = part.states if kept == count else part.states[-window:].clone()
            text.unread.append((states, text.end - kept, kept))
            text.waiting += kept
            while text.waiting - text.unread[0][2] >= window:
                text.waiting -= text.unread.popleft()[2]

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """One pass of the network for all requests; then each one's tree."""
        drafts = [Draft() for _ in requests]
        ends = [self._texts[r.id].end if r.id in self._texts else -1 for r in requests]
        ready = [i for i, r in enumerate(requests) if budgets[i] > 0 and 0 < ends[i] == len(r.tokens) - 1]
        if not ready:
            return drafts
        texts = [self._texts[requests[i].id] for i in ready]
        length = min(self._network.about.length, max(budgets[i] for i in ready))
        # The most probable tokens of greedy texts are found natively; noise, penalties and the like are numpy's.
        plain = [requests[i].sampling.greedy and requests[i].sampling.plain for i in ready]
        if self._native is None:
            with torch.inference_mode():
                found = self._network.draft(self._see(texts), [requests[i].tokens[-1] for i in ready], length)
            for each in found:
                argmax_tokens(each.base, "draft")
            grown, places = [Draft() for _ in ready], list[Places | None](found)
        else:
            asked = [
                Asked(
                    self._native_text(text),
                    text.take(self._network.about.window),
                    *(text.end, requests[i].tokens[-1], budgets[i] if simple else 0),
                )
                for i, text, simple in zip(ready, texts, plain, strict=True)
            ]
            grown, places = self._native.draft(asked, length, Growth(self._branch, _CONSIDERED, self.worth, UNSURE))
        for i, own, draft in zip(ready, places, grown, strict=True):
            drafts[i] = draft if own is None else self._grow(requests[i], budgets[i], own)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn: the states of what was accepted were read."""

    def close(self, request: Request) -> None:
        self._texts.pop(request.id, None)

    def _native_text(self, text: _Text) -> NativeText:
        assert self._native is not None
        if text.native is None:
            text.native = self._native.text()
        return text.native

    def _see(self, texts: Sequence[_Text]) -> list[Seen]:
        """Reads what the texts have not read yet, all of it at once."""
        network, window = self._network, self._network.about.window
        taken = [text.take(window) for text in texts]
        new = [(text, *unread) for text, unread in zip(texts, taken, strict=True) if unread is not None]
        if new:
            places = torch.tensor([place for _, _, own in new for place in own])
            fused, first = network.fused(torch.cat([states for _, states, _ in new])), 0
            found = network.keys_values(fused, places)
            for text, _, own in new:
                part = slice(first, first + len(own))
                first = part.stop
                added = [layer[:, part] for layer in found]
                known = [layer[:, :0] for layer in added] if text.plain is None else text.plain[0]
                both = [torch.cat(pair, dim=1)[:, -window:] for pair in zip(known, added, strict=True)]
                text.plain = both, fused[part.stop - 1]
        return [Seen(*text.plain, text.end) for text in texts if text.plain is not None]

    def _grow(self, request: Request, budget: int, places: Places) -> Draft:
        """The most probable nodes, as long as they are worth their rows."""
        tree = Tree()
        memories: dict[int, Floats] = {}  # of each node, with which its children were found
        heap: list[tuple[float, int, int]] = []

        def offer(node: int, rank: int) -> None:
            shares = tree.candidates[node].shares
            if rank < min(len(shares), self._branch):
                heapq.heappush(heap, (-tree.joint(node) * shares[rank], node, rank))

        def expand(node: int, before: Floats) -> None:
            depth = tree.depth(node)
            if depth < len(places.base):
                token = request.tokens[-1] if node == ROOT else tree.tokens[node]
                memories[node] = self._network.memory.after(before, token, places.of_row[depth])
                tree.candidates[node] = self._candidates(request, tree.path(node), memories[node], places)
                offer(node, 0)

        expand(ROOT, np.zeros(self._network.about.rank, np.float32))
        while heap and len(tree.tokens) < budget and -heap[0][0] >= self.worth:
            _, parent, rank = heapq.heappop(heap)
            node = tree.take(parent, rank)
            offer(parent, rank + 1)
            expand(node, memories[parent])
        return Draft(tree.tokens, tree.parents)

    def _candidates(self, request: Request, path: list[int], memory: Floats, places: Places) -> Candidates:
        """The children of the node at the end of a path, in order, with the probabilities of being the target's."""
        network, row, known = self._network, places.rows[len(path)], places.base[len(path)]
        sampling, names, adds = request.sampling, network.frequent, network.memory.adds
        simple = sampling.greedy and sampling.plain
        if simple or names is not None:
            found = self._sure(self._most_probable(memory, known, names), row, memory)
            if names is not None and not path and found.shares[0] < UNSURE:
                # The token may be a rare one, of which the confidence does not know.
                known, names = network.whole_logits(row), None
                found = self._most_probable(memory, known, names)
            if simple:
                return found
        logits = known + adds @ memory if names is None else np.full(len(adds), -np.inf, np.float32)
        if names is not None:
            logits[names] = known + adds[names] @ memory
        context = (sampling, request.tokens, [path], request.prompt_length, request.stop_tokens)
        rows = Distributions(logits, *context)
        if sampling.greedy:
            scores = rows.scores(0)
            return ranked(np.exp(scores - scores.max()), self._branch)
        weights = rows.array(0)
        if self._rule == "coupled":
            position = len(request.tokens) + len(path)
            weights = weights / request.noise.exponential(sampling.seed, position, len(weights))
        return ranked(weights, self._branch)

    def _most_probable(self, memory: Floats, known: NDArray[Any], names: NDArray[np.int64] | None) -> Candidates:
        """The children of a greedy text's node, with their probabilities among the tokens considered.

        known: a place's logits, float32; names: their tokens, None: all in order.
        """
        adds = self._network.memory.adds
        at = _considered(known)
        tokens = at if names is None else names[at]
        scores = known[at] + adds[tokens] @ memory
        order = np.argsort(-scores, kind="stable")[: self._branch]
        weights = np.exp(scores - scores.max())
        shares = (weights[order] / weights.sum()).tolist()
        return Candidates(tokens[order].tolist(), shares, shares)

    def _sure(self, found: Candidates, row: Floats, memory: Floats) -> Candidates:
        """The same children; the first one's probability is the confidence, and the others share what is left."""
        best, *others = found.shares
        sure = self._network.memory.is_right(row, memory, float(np.log(best)))
        rest = (1 - sure) / max(1e-9, 1 - best)
        shares = [sure, *(share * rest for share in others)]
        return Candidates(found.tokens, shares, shares)


def _considered(logits: NDArray[Any]) -> NDArray[np.int64]:
    """The tokens whose logits (n,) float32 lie at most so many eighths of a nat below the largest one as it takes to
    have `_CONSIDERED` of them: to sort all takes longer than all else of a place."""
    steps = np.minimum((logits.max() - logits) * np.float32(8), 255).astype(np.int64)
    there = np.bincount(steps, minlength=256).cumsum()
    return np.flatnonzero(steps <= min(int(np.searchsorted(there, _CONSIDERED)), 255))
