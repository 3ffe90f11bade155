"""A draft model's cache that follows texts and holds, for one forward at a time, a tree behind each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from runtime.drafters import Request
from runtime.drafters.growth import ROOT, Tree
from runtime.drafters.model import PREFILL_ROWS
from runtime.rows import Decoder, Rows, integers


@dataclass
class _Text:
    """A request's place in the cache: the first `fed` tokens of its text, then the rows of a tree.

    `branches` are the tree's (token, parent), parents as indices among them and −1 for the text's last token.
    """

    handle: int
    fed: int = 0
    branches: list[tuple[int, int]] = field(default_factory=list)


class TreeCache:
    """Feeds texts and trees to a decoder. A row sees all that its request's cache held before the forward, so a tree
    never stays: each level is fed with its ancestors, which costs rows but no forwards. Of the last tree, what the text
    took of it is kept.
    """

    def __init__(self, decoder: Decoder, tree_rows: int) -> None:
        """`tree_rows`: the most rows of one tree in one forward."""
        self._decoder, self._tree_rows = decoder, tree_rows
        self._cache = decoder.new_cache()
        self._texts: dict[int, _Text] = {}

    def fed(self, request: Request) -> int:
        """How many tokens of the request's text are in the cache."""
        return self._texts[request.id].fed if request.id in self._texts else 0

    def feed_texts(self, requests: Sequence[Request]) -> Tensor:
        """Feeds what is missing of each text, its last token in any case; logits (requests, V) after them."""
        tokens: list[int] = []
        spans, ends = [], []
        for request in requests:
            text = self._follow(request)
            while len(request.tokens) - text.fed > PREFILL_ROWS:
                piece = request.tokens[text.fed : text.fed + PREFILL_ROWS]
                rows = Rows.chains([(text.handle, text.fed, PREFILL_ROWS)])
                self._decoder.forward(integers(piece), rows, self._cache, integers([]))
                text.fed += PREFILL_ROWS
            spans.append((text.handle, text.fed, len(request.tokens) - text.fed))
            tokens += request.tokens[text.fed :]
            ends.append(len(tokens) - 1)
            text.fed = len(request.tokens)
        return self._decoder.forward(integers(tokens), Rows.chains(spans), self._cache, integers(ends)).logits

    def feed_trees(self, requests: Sequence[Request], trees: Sequence[Tree], wanted: Sequence[Sequence[int]]) -> Tensor:
        """Feeds the wanted nodes of each tree behind its text; logits (nodes, V), tree by tree in the order given.

        The texts are complete in the cache: `feed_texts` came before.
        """
        tokens: list[int] = []
        handles: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        at: list[int] = []
        for request, tree, nodes in zip(requests, trees, wanted, strict=True):
            text, base = self._texts[request.id], len(tokens)
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

    def close(self, request: Request) -> None:
        """Frees the request's cache."""
        text = self._texts.pop(request.id, None)
        if text is not None:
            self._cache.close(text.handle)

    def _follow(self, request: Request) -> _Text:
        """Rolls the request's cache back to its text without the last token: what the text took of the tree stays."""
        text = self._texts.get(request.id)
        if text is None:
            room = min(request.prompt_length + request.max_new_tokens, self._decoder.max_positions) + self._tree_rows
            text = self._texts[request.id] = _Text(self._cache.open(room))
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
