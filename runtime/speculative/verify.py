"""Which drafted tokens the target accepts, and the token it adds: pure functions, for chains and trees alike.

Every rule reads the target at a draft's nodes: row 0 follows the request's last token, row i + 1 follows draft token i.
The number of a draft token's row in these rules is never the number of its row in the cache. `position` is the absolute
position of the first draft token (the length of the text so far), `noise` the function `exponential` or a memo of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.sampling.noise import Stream, exponential, pick, race, uniforms
from runtime.sampling.params import Sampling
from runtime.speculative.draft import Draft, Rule

Noise = Callable[[int, int, int], NDArray[np.float64]]


class Acceptance(NamedTuple):
    """`path`: the accepted draft indices, root first. `next_token`: what the target puts after them."""

    path: list[int]
    next_token: int


class TargetRows(Protocol):
    """(n + 1, V) float64 probability rows: a tensor, or `distribution.Distributions`, which computes them on demand."""

    def __getitem__(self, row: int, /) -> Tensor:
        """(V,) float64."""


def sampled_on_device(sampling: Sampling, rule: Rule) -> bool:
    """Whether a request's tokens can be sampled on the device."""
    return sampling.plain and (sampling.greedy or rule == "coupled")


def require_sound(draft: Draft, budget: int, vocab_size: int) -> None:
    """Raises ValueError for a draft that breaks the drafter's contract (a programming error, not a user's)."""
    count = len(draft.tokens)
    if count > max(budget, 0) or len(draft.parents) != count:
        raise ValueError(f"a draft of {count} tokens and {len(draft.parents)} parents for a budget of {budget}")
    if not draft.is_chain and any(not -1 <= parent < index for index, parent in enumerate(draft.parents)):
        raise ValueError(f"draft parents must come before their children, found {draft.parents}")
    if count and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
        raise ValueError(f"draft tokens must be in the vocabulary 0..{vocab_size - 1}, found {draft.tokens}")
    if draft.probs is not None and tuple(draft.probs.shape) != (count, vocab_size):
        raise ValueError(f"draft probabilities must be {(count, vocab_size)}, found {tuple(draft.probs.shape)}")


def greedy(tokens: Sequence[int], draft: Draft) -> Acceptance:
    """Accepts the path on which every token is the target's own; tokens (n + 1) are its argmax at each row."""
    if draft.is_chain:
        count = 0
        while count < len(draft.tokens) and draft.tokens[count] == tokens[count]:
            count += 1
        return Acceptance([*range(count)], tokens[count])
    return _walk(draft, lambda row, depth: tokens[row])


def greedy_rows(choose: Callable[[int], int], draft: Draft) -> Acceptance:
    """`greedy` where the target's token at a row, choose(row), is worked out only for the rows on the path."""
    return _walk(draft, lambda row, depth: choose(row))


def coupled(target_rows: TargetRows, draft: Draft, position: int, seed: int, noise: Noise = exponential) -> Acceptance:
    """Samples the target at each node with its position's noise and walks on while the draft has that token.

    The text is a function of the target and the seed alone (drafter-invariant speculation, 2408.07978): the draft only
    decides how much of it is found in one forward.
    """

    def target_token(row: int, depth: int) -> int:
        distribution = target_rows[row].numpy()
        return race(distribution, noise(seed, position + depth, len(distribution)))

    return _walk(draft, target_token)


def rejection(target_rows: TargetRows, draft: Draft, position: int, seed: int) -> Acceptance:
    """Traversal verification (2505.12398), which in a chain is block verification (2403.10444).

    Leviathan's rule (2211.17192) judges token by token, from the text on; here a path is judged as a whole, the deepest
    node first, and no exact rule accepts more of a chain. A node's mass is the probability with which a text goes
    through it, given its tokens: 1 at the text, and min(1, mass · p(x) / q(x)) at a child x, which was drawn from q. A
    node without children is accepted with its mass. Where it is not, it goes, and its parent's p becomes
    norm(max(mass · p − q, 0)), whose sum S makes the parent's mass S / (S + 1 − mass): from these the next sibling is
    judged and, after the last, the parent itself. The next token is drawn from what is left of the accepted node's p.

    For siblings drawn without replacement q is what was left of the node's distribution. Without `probs` a token was
    not drawn at random: q is one-hot. That the output is the target's holds for every draft of which each token was
    drawn from its q whatever was drawn before, with noise that no other round uses: what is looked at here may have
    been drawn behind the tokens that are accepted.
    Raises ValueError when a drafted token has probability 0 in the distribution that it is said to come from.
    """
    tests = uniforms(seed, position, Stream.ACCEPT, len(draft.tokens))
    below = draft.children
    path = [_Node(-1, 1.0, target_rows[0].numpy(), below.get(-1, []))]
    while True:
        node = path[-1]
        if node.children:
            child, *node.children = node.children
            token, proposal = draft.tokens[child], _proposal(draft, child, len(node.left))
            if proposal[token] == 0:
                at = position + len(path) - 1
                raise ValueError(f"draft token {token} at position {at} has probability 0 in its own distribution")
            mass = min(1.0, node.mass * float(node.left[token] / proposal[token]))
            # What follows a token that will hardly be accepted is not worth its rows of the target.
            further = below.get(child, []) if mass > _FAINT else []
            path.append(_Node(child, mass, target_rows[child + 1].numpy() if mass > 0 else node.left, further))
        elif node.index < 0 or tests[node.index] < node.mass:
            at = position + len(path) - 1
            token = pick(node.left, uniforms(seed, at, Stream.RESIDUAL, 1)[0])
            return Acceptance([one.index for one in path[1:]], token)
        else:
            path.pop()
            path[-1].lose(_proposal(draft, node.index, len(node.left)))


# The mass below which a node's children are left alone.
_FAINT = 0.02


@dataclass
class _Node:
    """A drafted token (−1: the text) on the path that is judged.

    mass      the probability with which a text goes through it.
    left      (V,) float64, normalised: what is left of the target's distribution of the token after it.
    children  those that are still to be judged, in order.
    """

    index: int
    mass: float
    left: NDArray[np.float64]
    children: list[int]

    def lose(self, proposal: NDArray[np.float64]) -> None:
        """What is left when a child drawn from `proposal` (V,) is not accepted."""
        remainder = np.maximum(self.mass * self.left - proposal, 0.0)
        total = float(remainder.sum())
        if total > 0:
            self.left, self.mass = remainder / total, total / (total + 1 - self.mass)
        elif self.mass < 1:
            self.mass = 0.0
        # Else p = q, of which nothing is lost but for rounding.


def typical(
    target_rows: TargetRows,
    draft: Draft,
    position: int,
    seed: int,
    noise: Noise = exponential,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Acceptance:
    """Medusa's typical acceptance (2401.10774), of the longest path; lossy: the text is not the target's.

    A token is typical where p > min(epsilon, delta · exp(−H(p))), H being the entropy of p in nats (eta sampling:
    Hewitt et al. 2022, 2210.15191), or where it is the most probable one, so that there always is one. What is typical
    is accepted, however improbable the draft made it; the token after it is sampled among the typical ones of p, with
    the position's shared noise.
    """
    below = draft.children
    longest: list[int] = []
    # Depth first, in draft order: of equally long paths the first one found is taken.
    open_paths: list[list[int]] = [[]]
    while open_paths:
        path = open_paths.pop()
        if len(path) > len(longest):
            longest = path
        node = path[-1] if path else -1
        if node not in below:
            continue
        allowed = _typical(target_rows[node + 1].numpy(), epsilon, delta)
        open_paths += [[*path, child] for child in reversed(below[node]) if allowed[draft.tokens[child]] > 0]
    last = _typical(target_rows[(longest[-1] if longest else -1) + 1].numpy(), epsilon, delta)
    return Acceptance(longest, race(last, noise(seed, position + len(longest), len(last))))


def _typical(row: NDArray[np.float64], epsilon: float, delta: float) -> NDArray[np.float64]:
    """(V,) probabilities with 0 for what is not typical (not normalised again)."""
    held = row[row > 0]
    threshold = min(epsilon, delta * float(np.exp((held * np.log(held)).sum())))
    out = np.where(row > threshold, row, 0.0)
    best = int(row.argmax())
    out[best] = row[best]
    return out


def _walk(draft: Draft, target_token: Callable[[int, int], int]) -> Acceptance:
    """Follows the target's tokens, target_token(row, depth), as long as the draft holds them."""
    below = draft.children
    path: list[int] = []
    node = -1
    while True:
        token = target_token(node + 1, len(path))
        match = next((child for child in below.get(node, []) if draft.tokens[child] == token), None)
        if match is None:
            return Acceptance(path, token)
        node = match
        path.append(match)


def _proposal(draft: Draft, index: int, size: int) -> np.ndarray:
    if draft.probs is not None:
        row: np.ndarray = draft.probs[index].numpy()
        return row
    one_hot = np.zeros(size)
    one_hot[draft.tokens[index]] = 1.0
    return one_hot
