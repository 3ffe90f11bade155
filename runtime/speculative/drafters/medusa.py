"""Medusa heads on the target's own hidden state draft a tree: no second model, no second cache (Cai et al. 2024)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from runtime.checkpoints.drafter_files import require_target
from runtime.checkpoints.medusa import DESCRIPTION, Description, read_description, read_weights
from runtime.errors import UserError
from runtime.kernels.activations import silu
from runtime.kernels.dispatch import Kernel, linear
from runtime.model.base import BaseDecoder
from runtime.model.layers import Linear
from runtime.sampling.candidates import ranked
from runtime.sampling.distribution import Distributions, Logits, argmax_tokens, host
from runtime.speculative.draft import Draft, Outcome, Request
from runtime.speculative.verify import Rule

if TYPE_CHECKING:
    from runtime.model.load import Model


@dataclass(frozen=True)
class Head:
    """One head: its residual blocks after the first, and what follows: the matrix before a shared projection, or its
    own projection."""

    blocks: tuple[Linear, ...]
    output: Linear


@dataclass(frozen=True)
class Heads:
    """All heads of a target on its kernels.

    first       (hidden) to (heads · hidden): the first block of every head in one product, as they read the same.
    projection  the target's own; None where each head has one.
    """

    description: Description
    first: Linear
    heads: tuple[Head, ...]
    projection: Linear | None = None

    def logits(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """(B, count, V) float32 of the first `count` heads (None: of all), after the target's hidden states
        (B, hidden), as the decoder returns them."""
        found = []
        begun = _plus_silu(hidden.unsqueeze(1), self.first(hidden).view(len(hidden), len(self.heads), -1))
        for number, head in enumerate(self.heads[:count]):
            x = begun[:, number].contiguous()
            for block in head.blocks:
                x = _plus_silu(x, block(x))
            found.append(head.output(x))
        stacked = torch.stack(found, dim=1)
        if self.projection is None:
            return stacked
        # One product for all heads: its weights, which are most of what a round reads, are read once.
        return self.projection(stacked.flatten(0, 1)).view(*stacked.shape[:2], -1)


def _plus_silu(x: Tensor, y: Tensor) -> Tensor:
    """x + silu(y)."""
    if x.device.type != "cpu":
        return x + silu(y)
    # numpy: torch's own threads would spin beside the kernels'.
    a, b = x.numpy(), y.numpy()
    with np.errstate(over="ignore"):
        return torch.from_numpy(a + b / (1 + np.exp(-b)))


def load_heads(folder: Path, target: "Model") -> Heads:
    """The heads in a `medusa/` directory, on the target's kernels.

    Raises UserError for files that are missing or damaged, for heads of other weights, and for a target that
    transformers runs, which verifies no trees.
    """
    decoder = target.decoder
    if not isinstance(decoder, BaseDecoder):
        raise UserError(
            f"medusa drafts trees on Specpress' own kernels, and {decoder.kernels} run this target; use another drafter"
        )
    description = read_description(folder)
    sizes = (description.hidden_size, description.vocab_size)
    if sizes != (decoder.hidden_size, decoder.vocab_size):
        raise UserError(
            f"{folder.name}: heads of hidden size and vocabulary {sizes} do not fit {target.path.name}, which has "
            f"{(decoder.hidden_size, decoder.vocab_size)}; name the model that they belong to"
        )
    require_target(description.target, folder, DESCRIPTION, target.path)
    weights = {name: tensor.to(decoder.device) for name, tensor in read_weights(folder, description).items()}
    names = [f"heads.{number}" for number in range(description.heads)]
    matrix, bias = (torch.cat([weights[f"{name}.layers.0.{part}"] for name in names]) for part in ("weight", "bias"))
    return Heads(
        description,
        linear(matrix, bias.float(), decoder.kernel),
        tuple(_head(description, weights, name, decoder.kernel) for name in names),
        decoder.parts.head if description.shared else None,
    )


def _head(about: Description, weights: dict[str, Tensor], prefix: str, kernel: Kernel) -> Head:
    blocks = tuple(
        linear(weights[f"{prefix}.layers.{i}.weight"], weights[f"{prefix}.layers.{i}.bias"].float(), kernel)
        for i in range(1, about.layers)
    )
    output = weights[f"{prefix}.{'mix' if about.shared else 'projection'}.weight"]
    return Head(blocks, linear(output, None, kernel))


class MedusaDrafter:
    """Drafts a tree in a given shape from the target's hidden state of the last token that it has read.

    heads   what `load_heads` returned.
    verify  the rule that will verify. `coupled`: a node's children are those of highest probability with the target's
            noise at that position, so that the first is what the head itself would sample. Otherwise they are its most
            probable tokens: no draws, and so without a distribution of their own (Draft.probs is None).

    All nodes of a depth have the same candidates: a head does not know which branch it continues. The budget counts
    nodes. A request whose hidden state is not known gets an empty draft; the forward that ends its prompt gives one.
    """

    name = "medusa"

    def __init__(self, heads: Heads, verify: Rule = "coupled") -> None:
        self._heads = heads
        self._rule: Rule = verify
        self._choices = heads.description.choices
        places = {choice: i for i, choice in enumerate(self._choices)} | {(): -1}
        self._parents = [places[choice[:-1]] for choice in self._choices]
        # By request: the length of the text whose last token was not read yet, and the state of the one before it.
        self._states: dict[int, tuple[int, Tensor]] = {}

    def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
        """The first nodes of the tree, as many as the budget allows; one pass of the heads for all requests."""
        drafts = [Draft() for _ in requests]
        known = [self._states[r.id][0] == len(r.tokens) if r.id in self._states else False for r in requests]
        ready = [i for i in range(len(requests)) if budgets[i] > 0 and known[i]]
        if ready:
            states = torch.stack([self._states[requests[i].id][1] for i in ready])
            # One copy from the device for all requests: the tree is grown on the host.
            depth = max(len(choice) for choice in self._choices[: max(budgets[i] for i in ready)])
            logits = host(self._heads.logits(states, depth).cpu())
            argmax_tokens(logits.reshape(-1, logits.shape[-1]), "draft")
            for i, rows in zip(ready, logits, strict=True):
                drafts[i] = self._draft(requests[i], budgets[i], rows)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keeps the hidden state of each text's last accepted token."""
        for outcome in outcomes:
            if outcome.hidden is not None:
                # A copy: the rows are good until the target's next forward, and belong to a larger tensor.
                state = outcome.hidden[outcome.length].clone()
                self._states[outcome.request.id] = (len(outcome.request.tokens), state)

    def close(self, request: Request) -> None:
        self._states.pop(request.id, None)

    def _draft(self, request: Request, budget: int, logits: Logits) -> Draft:
        """The tree of one request; logits (heads, V)."""
        choices = self._choices[:budget]
        branches = [0] * max(map(len, choices))
        for choice in choices:
            branches[len(choice) - 1] = max(branches[len(choice) - 1], choice[-1] + 1)
        candidates = self._candidates(request, logits[: len(branches)], branches)
        tokens: list[int] = []
        parents: list[int] = []
        places = {-1: -1}
        for number, (choice, parent) in enumerate(zip(choices, self._parents, strict=False)):
            found, rank = candidates[len(choice) - 1], choice[-1]
            # Sampling may leave fewer tokens than the tree has ranks (top-k).
            if parent in places and rank < len(found):
                places[number] = len(tokens)
                tokens.append(found[rank])
                parents.append(places[parent])
        return Draft(tokens, parents)

    def _candidates(self, request: Request, logits: Logits, branches: Sequence[int]) -> list[list[int]]:
        """For each depth its branches[depth] best tokens in order, after logits (depths, V)."""
        sampling = request.sampling
        # A head does not know the nodes above it, so penalties look at the text alone.
        rows = Distributions(
            logits, sampling, request.tokens, [[]] * len(branches), request.prompt_length, request.stop_tokens
        )
        found = []
        for depth, branch in enumerate(branches):
            if sampling.greedy:
                # The order alone counts, which float32 keeps.
                scores = logits[depth] if sampling.plain else rows.scores(depth)
                weights = np.exp(scores - scores.max())
            else:
                weights = rows.array(depth)
                if self._rule == "coupled":
                    position = len(request.tokens) + depth
                    weights = weights / request.noise.exponential(sampling.seed, position, len(weights))
            found.append(ranked(weights, branch).tokens)
        return found
