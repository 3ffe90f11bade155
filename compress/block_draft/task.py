"""Training the network of the drafter `block` on kept hidden states, and what it is worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional

from compress.artifact.files import write_atomic
from compress.block_draft.network import BlockNetwork
from compress.block_draft.objective import Learned, Teacher, blocks_of, learn
from compress.medusa.own_text import WATCHED, Text
from compress.recipe.block_draft import BlockDraft
from compress.training.contract import Group, Loss
from runtime import Model, Speculator
from runtime.checkpoints.block_draft import DESCRIPTION, WEIGHTS
from runtime.engine.metrics import Metrics, total
from runtime.model.base import BaseDecoder
from runtime.speculative.drafters.block import BlockDrafter
from runtime.speculative.drafters.block_network import load_network

# Matrices that begin at random in any case, and the rate of those that do not: Muon, and AdamW at the rate of the
# others, would leave nothing of what they begin with.
_AT_RANDOM = ("of_token", "of_row", "of_memory", "add")
_BEGUN_RATE = 0.25
# How probable a place is as an anchor of which the target was quite sure, over one of which it was not at all.
_EVEN = 0.35
# Windows that are looked at together when the best weights are chosen.
_AT_ONCE = 4


@dataclass(frozen=True, eq=False)
class Head:
    """The target's last norm and its head, which make its logits of its states behind the last of its `layers`.

    table (V, hidden); weight and bias (hidden,), None: no bias; is_rms: by the root mean square.
    """

    table: Tensor
    weight: Tensor
    bias: Tensor | None
    is_rms: bool
    eps: float
    layers: int

    @classmethod
    def of(cls, decoder: BaseDecoder, table: Tensor) -> "Head":
        norm, a = decoder.parts.norm, decoder.architecture
        return cls(table, norm.weight, norm.bias, a.norm == "rms", a.norm_eps, decoder.layers)

    def rows(self, stream: Tensor) -> Tensor:
        """(…, hidden): what the table makes logits of, from the residual stream (…, hidden) behind the last layer."""
        if self.is_rms:
            return functional.rms_norm(stream, self.weight.shape, self.weight, self.eps)
        return functional.layer_norm(stream, self.weight.shape, self.weight, self.bias, self.eps)


class BlockTask:
    """The network over windows whose states were kept; `autocast`: evaluation computes in bfloat16, too."""

    def __init__(self, network: BlockNetwork, stage: BlockDraft, text: Text, head: Head, autocast: bool) -> None:
        self.network, self._stage, self._text, self._head, self._autocast = network, stage, text, head, autocast
        # By window, what is asked of the target at each visit: how little sure it was.
        self._doubt: dict[int, Tensor] = {}

    def groups(self) -> list[Group]:
        """Matrices, those that begin as they are meant to at a lower rate, and everything else, without decay."""
        named = dict(self.network.named_parameters())
        inner = {name for name, p in named.items() if p.ndim == 2 and name not in ("places", "tap_norms")}
        begun = {name for name in inner if self.network.begun and name not in _AT_RANDOM and "layers." not in name}
        begun |= {name for name in inner if self.network.begun and name.startswith("layers.0.")}
        of = {
            "begun": [named[name] for name in named if name in begun],
            "matrices": [named[name] for name in named if name in inner - begun],
            "rest": [parameter for name, parameter in named.items() if name not in inner],
        }
        return [
            *([Group("begun", of["begun"], rate_factor=_BEGUN_RATE)] if begun else []),
            Group("matrices", of["matrices"], optimizer=self._stage.optimizer),
            Group("rest", of["rest"], weight_decay=0.0),
        ]

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """batch (B, 1): numbers of windows. Drafts begin at random places, where they would begin as a rule."""
        windows = batch.flatten().tolist()
        tokens, states = self._text.train.read(windows)
        found = self._learn(tokens, states, self.anchors(windows, tokens, states))
        parts = {
            "cross entropy": found.cross_entropy,
            "distillation": found.distillation,
            "confidence": found.confidence,
        }
        return Loss(found.value, parts)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over held-out windows, nats, of drafts at evenly spaced places."""
        losses, counts = [], []
        begins = self._text.begins[1].split(_AT_ONCE)
        for (tokens, states), first in zip(self._text.watched.blocks(_AT_ONCE), begins, strict=True):
            low, high = first.clamp(min=2) - 1, tokens.shape[1] - 1
            shares = torch.linspace(0, 1, self._stage.anchors)
            anchors = (low.unsqueeze(1) + shares * (high - 1 - low).unsqueeze(1)).long()
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                losses.append(float(self._learn(tokens, states, anchors).value))
            counts.append(len(tokens))
            if sum(counts) >= WATCHED:
                break
        return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)

    def state(self) -> dict[str, Tensor]:
        return dict(self.network.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.network.load_state_dict(dict(state))

    def anchors(self, windows: Sequence[int], tokens: Tensor, states: Tensor) -> Tensor:
        """(B, anchors) int64: random places of the target's own text, the more probable the less sure it was of the
        token there; where a text stands as it is, of all behind the shortest prompt.

        A draft begins behind what the one before it did not foresee.
        """
        begins, high = self._text.begins[0][list(windows)].clamp(min=2) - 1, tokens.shape[1] - 1
        weights = torch.ones(len(tokens), high)
        if (known := self._teacher_rows(states)) is not None:
            for place, window in enumerate(windows):
                if window not in self._doubt:
                    self._doubt[window] = self._doubts(known[place, : high - 1])
                weights[place, 1:] = _EVEN + self._doubt[window]
        weights[torch.arange(high) < begins.unsqueeze(1)] = 0.0
        few = self._stage.anchors > high - int(begins.max())
        return torch.multinomial(weights, self._stage.anchors, replacement=few)

    @torch.no_grad()
    def _doubts(self, rows: Tensor) -> Tensor:
        """(n,): how probable another token was than the target's most probable one, of rows (n, hidden)."""
        return 1 - functional.linear(rows, self._head.table).softmax(-1).amax(-1).float()

    def _teacher_rows(self, states: Tensor) -> Tensor | None:
        """(B, T, hidden): what the target's head reads; None where its final states were not kept."""
        about = self.network.about
        return self._head.rows(states[..., -about.hidden_size :]) if about.taps[-1] == self._head.layers else None

    def _learn(self, tokens: Tensor, states: Tensor, anchors: Tensor) -> Learned:
        blocks, places = blocks_of(tokens, states, anchors, self.network.about.length)
        teacher = Teacher(tokens, self._head.table, self._teacher_rows(states))
        return learn(self.network, blocks, places, teacher, self._stage.decay, self._stage.distill)


def write(network: BlockNetwork, out: Path) -> None:
    """Writes block.json and block.safetensors (bfloat16, tokens int32); equal networks give equal bytes."""
    out.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in network.stored().items()
    }
    write_atomic(out / WEIGHTS, save(stored, metadata={"format": "pt"}))
    write_atomic(out / DESCRIPTION, network.about.to_json().encode())


def assess(stage: BlockDraft, network: BlockNetwork, target: Model, text: Text, out: Path) -> Metrics:
    """Writes the drafter to `out`, and decodes the held-out prompts greedily with it, eight tokens a round at most."""
    write(network, out)
    drafter = BlockDrafter(load_network(out, target))
    speculator = Speculator(target, drafter, NODES)
    results = [result for prompts, new in text.asked() for result in speculator.generate(prompts, new, stop=())]
    return total([result.metrics for result in results])


NODES = 8
