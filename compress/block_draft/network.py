"""The network of the drafter `block` as a module to train; runtime/speculative/drafters/block.py runs it.

All drafted positions are computed at once (DFlash, 2602.06036): rows that know only their own number read what the
target's hidden states at three depths say of the text. A small recurrence then goes along the drafted tokens, so that
each position knows those before it (the low-rank Markov head of DSpark, 2607.05147, with a memory), and says how sure
it is.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.checkpoints.block_draft import Description


@dataclass(frozen=True)
class Blocks:
    """Drafts to learn from, n of them in each of B windows of T tokens.

    states   (B, T, taps · hidden): the target's.
    anchors  (B, n) int64: places of the last token of the text, whose state is not known; 1 at least.
    tokens   (B, n, length) int64: the token at the anchor and those behind it, but the last one drafted.
    """

    states: Tensor
    anchors: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Drafted:
    """What the network says of n blocks: rows (n, length, hidden) whose products with the target's head are logits, and
    what its confidence is made of, (n, length, hidden + rank), from where no gradient goes back."""

    rows: Tensor
    told: Tensor


class Layer(nn.Module):
    """Attention over the text's fused states and the block's own rows, then a gated MLP, each behind a norm."""

    def __init__(self, about: Description) -> None:
        super().__init__()
        hidden, heads, keys = about.hidden_size, about.heads * about.head_dim, about.kv_heads * about.head_dim
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.query, self.output = _matrix(heads, hidden), _matrix(hidden, heads, about.layers)
        self.key, self.value = _matrix(keys, hidden), _matrix(keys, hidden)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.gate, self.up = _matrix(about.intermediate_size, hidden), _matrix(about.intermediate_size, hidden)
        self.down = _matrix(hidden, about.intermediate_size, about.layers)

    def forward(
        self, x: Tensor, fused: Tensor, turns: tuple[Tensor, Tensor], seen: Tensor, about: Description
    ) -> Tensor:
        """x (B, n · length, hidden) behind the layer.

        fused (B, T, hidden); turns: cos and sin (B, T + n · length, dim / 2) of the text's places and the rows';
        seen (B, 1, n · length, T + n · length) bool.
        """
        normed = _norm(x, self.attention_norm, about)
        read = torch.cat((fused, normed), dim=1)
        q = _heads(functional.linear(normed, self.query), about.heads)
        k, v = (_heads(functional.linear(read, part), about.kv_heads) for part in (self.key, self.value))
        q, k = _rotate(q, *(part[:, fused.shape[1] :] for part in turns)), _rotate(k, *turns)
        mixed = functional.scaled_dot_product_attention(q, k.to(v.dtype), v, attn_mask=seen, enable_gqa=True)
        x = x + functional.linear(mixed.transpose(1, 2).flatten(2), self.output)
        normed = _norm(x, self.mlp_norm, about)
        gated = functional.silu(functional.linear(normed, self.gate)) * functional.linear(normed, self.up)
        return x + functional.linear(gated, self.down)


class BlockNetwork(nn.Module):
    """The drafter of one target.

    embedding, head  (V, hidden): the target's own tables, which are not trained here.
    frequent         (about.frequent,) int64: tokens whose rows of the head a draft reads; None: all. Rows are trained
                     on the whole head, confidence on what these can say: of a rare token it is not sure.
    """

    def __init__(self, about: Description, embedding: Tensor, head: Tensor, frequent: Tensor | None = None) -> None:
        super().__init__()
        hidden, rank, taps = about.hidden_size, about.rank, len(about.taps)
        self.about = about
        # What rows begin with, over what `anchor`, `last` and `places` say: in a stream that is far larger than 1
        # optimizers would hardly move matrices of its size.
        self.spread = 1.0
        self.begun = False  # whether it begins as the target's last layer
        self.embedding: Tensor
        self.head: Tensor
        self.frequent = frequent
        self.register_buffer("embedding", embedding.detach().float(), persistent=False)
        self.register_buffer("head", head.detach().float(), persistent=False)
        self.tap_norms = nn.Parameter(torch.ones(taps, hidden))
        self.fuse, self.fuse_norm = _matrix(hidden, taps * hidden), nn.Parameter(torch.ones(hidden))
        self.anchor, self.last = _matrix(hidden, hidden), _matrix(hidden, hidden)
        self.places = nn.Parameter(torch.randn(about.length, hidden) * 0.5)
        self.layers = nn.ModuleList([Layer(about) for _ in range(about.layers)])
        self.norm = nn.Parameter(torch.ones(hidden))
        # The recurrence: what a token, a row and the memory say of two gates, and what the memory adds to the logits.
        self.of_token, self.of_row = _matrix(2 * rank, hidden), _matrix(2 * rank, hidden)
        self.of_memory, self.gates = _matrix(2 * rank, rank), nn.Parameter(torch.zeros(2 * rank))
        self.add = nn.Parameter(torch.zeros(hidden, rank))
        self.sure = nn.Parameter(torch.zeros(hidden + rank + 2))

    def forward(self, blocks: Blocks) -> Drafted:
        """The blocks' drafts, with the tokens that they are given before each place."""
        about, length = self.about, self.about.length
        rows, anchors = self._rows(blocks), blocks.anchors.flatten(0, 1)
        token = functional.linear(self.embedded(blocks.tokens.flatten(0, 1)), self.of_token)
        row = functional.linear(rows, self.of_row)
        memory, memories = rows.new_zeros((len(anchors), about.rank)), []
        for place in range(length):
            gates = token[:, place] + row[:, place] + functional.linear(memory, self.of_memory) + self.gates
            opened, new = gates.float().chunk(2, dim=1)
            memory = memory + torch.sigmoid(opened) * (torch.tanh(new) - memory)
            memories.append(memory)
        held = torch.stack(memories, dim=1)
        told = torch.cat((rows.detach().float(), held.detach().float()), dim=-1)
        return Drafted(rows + functional.linear(held, self.add), told)

    def stored(self) -> dict[str, Tensor]:
        """The weights as Description.shapes names them."""
        spread = dict.fromkeys(("anchor", "last", "places"), self.spread)
        found = {name: tensor.detach() * spread.get(name, 1.0) for name, tensor in self.state_dict().items()}
        return found if self.frequent is None else found | {"frequent": self.frequent.int()}

    def confidence(self, told: Tensor, best: Tensor) -> Tensor:
        """The logit (…) that the most probable token, whose logarithm of a probability is `best`, is the target's."""
        return told @ self.sure[:-2] + best * self.sure[-2] + self.sure[-1]

    def _rows(self, blocks: Blocks) -> Tensor:
        """(B · n, length, hidden): the normed rows that logits are made of."""
        about, (batch, count) = self.about, blocks.anchors.shape
        fused, span = self.fused(blocks.states), blocks.states.shape[1]
        before = (blocks.anchors - 1).unsqueeze(2).expand(-1, -1, about.hidden_size)
        anchored = functional.linear(self.embedded(blocks.tokens[..., 0]), self.anchor)
        common = anchored + functional.linear(fused.gather(1, before), self.last)
        x = self.spread * (common.unsqueeze(2) + self.places).flatten(1, 2)
        places = (blocks.anchors.unsqueeze(2) + torch.arange(about.length)).flatten(1)
        text = torch.arange(span).expand(batch, -1)
        turns = angles(torch.cat((text, places), dim=1), about)
        x_of = torch.arange(count).repeat_interleave(about.length)
        anchor = blocks.anchors[:, x_of].unsqueeze(2)
        seen = (text.unsqueeze(1) < anchor) & (text.unsqueeze(1) >= anchor - about.window)
        own = (x_of.unsqueeze(0) == x_of.unsqueeze(1)).expand(batch, -1, -1)
        mask = torch.cat((seen, own), dim=2).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, fused, turns, mask, about)
        return _norm(x, self.norm, about).view(batch * count, about.length, -1)

    def fused(self, states: Tensor) -> Tensor:
        """(…, hidden): what keys and values are made of, from states (…, taps · hidden)."""
        each = states.unflatten(-1, (len(self.about.taps), -1))
        normed = torch.cat([_norm(each[..., i, :], norm, self.about) for i, norm in enumerate(self.tap_norms)], dim=-1)
        return _norm(functional.linear(normed, self.fuse), self.fuse_norm, self.about)

    def embedded(self, tokens: Tensor) -> Tensor:
        """(…, hidden): normed rows of the embedding."""
        return functional.rms_norm(self.embedding[tokens], self.embedding.shape[1:], eps=self.about.norm_eps)


def angles(places: Tensor, about: Description) -> tuple[Tensor, Tensor]:
    """cos and sin (…, head_dim / 2) of places (…) int64."""
    half = about.head_dim // 2
    rates = torch.exp(-math.log(about.rope_theta) * torch.arange(half) / half)
    turned = places.float().unsqueeze(-1) * rates
    return turned.cos(), turned.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads x (B, heads, T, dim), halves against each other, by cos and sin (B, T, dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _norm(x: Tensor, weight: Tensor, about: Description) -> Tensor:
    return functional.rms_norm(x.float(), weight.shape, weight, about.norm_eps)


def _matrix(outputs: int, inputs: int, depth: int = 0) -> nn.Parameter:
    """Random, of the size that keeps variances; what is added to the stream of `depth` layers is smaller."""
    return nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs * max(1, 2 * depth)))
