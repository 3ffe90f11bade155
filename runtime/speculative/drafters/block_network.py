"""The network of the drafter `block` on the target's kernels.

    fused      of each token of the text: the target's states at some depths, each normed, through one matrix
    rows       of each drafted place: its own vector, what the text's last token is, and the last fused state
    layers     attention over the fused states of the text and over all rows (DFlash, 2602.06036), then a gated MLP
    base       a row's logits, by the target's own head, or a copy of it in fewer bits, which may have rows for frequent
               tokens alone (FR-Spec, 2502.14856): of a large vocabulary the head is most of what a draft reads
    memory     goes along the drafted tokens: two gates of the token before, the row and the memory; what it adds to a
               place's logits is of low rank (the Markov head of DSpark, 2607.05147, which has no memory)
    sure       a place's probability that its most probable token is the target's

Everything but the memory is computed for all places at once, so that a draft reads the weights once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from runtime.checkpoints.block_draft import DESCRIPTION, Description, read_description, read_weights
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.drafter_files import require_target
from runtime.checkpoints.open import open_checkpoint
from runtime.errors import UserError
from runtime.formats import dequantize
from runtime.formats.schemes import SCHEMES
from runtime.kernels.dispatch import Kernel, linear
from runtime.kernels.reference import rotate
from runtime.model.base import BaseDecoder
from runtime.model.layers import Linear

if TYPE_CHECKING:
    from runtime.model.load import Model

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer: queries of rows; keys and values of rows and of fused states."""

    attention_norm: Tensor
    query: Linear
    keys_values: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, eq=False)
class Seen:
    """What the layers see of one text: of each a (2, n, kv_heads, head_dim), rotated keys and values, and the last
    fused state (hidden,); the text's last token has the place `end`."""

    keys_values: Sequence[Tensor]
    last: Tensor
    end: int


@dataclass(frozen=True, eq=False)
class Memory:
    """What goes along a draft, on the host, all float32.

    of_token (V, 2 · rank); of_memory (2 · rank, rank), gates (2 · rank,); adds (V, rank) to the logits, bfloat16
    numbers, for a draft reads many of them; and of `sure` the parts of a row (hidden,), of the memory (rank,), of the
    most probable token's logarithm, and the constant.
    """

    of_token: Floats
    of_memory: Floats
    gates: Floats
    adds: Floats
    sure: tuple[Floats, Floats, float, float]

    def after(self, before: Floats, token: int, of_row: Floats) -> Floats:
        """The memory (rank,) behind a token, at the place whose row says (2 · rank,) of the gates."""
        opened, new = np.split(self.of_token[token] + of_row + self.of_memory @ before + self.gates, 2)
        with np.errstate(over="ignore"):
            share = 1 / (1 + np.exp(-opened))
        return before + share * (np.tanh(new) - before)

    def is_right(self, row: Floats, memory: Floats, best: float) -> float:
        """The probability that the most probable token of a place, whose logarithm of a probability is `best`, is the
        target's."""
        of_row, of_memory, of_best, constant = self.sure
        told = float(row @ of_row + memory @ of_memory) + of_best * best + constant
        return float(1 / (1 + np.exp(-told)))


@dataclass(frozen=True, eq=False)
class Places:
    """What is known of a draft's places before it has tokens, on the host: rows (length, hidden), their part of the
    gates (length, 2 · rank), and the head's logits (length, V or frequent tokens), without the memory's part."""

    rows: Floats
    of_row: Floats
    base: Floats


@dataclass(frozen=True, eq=False)
class BlockNetwork:
    """The network of one target.

    embedding  (V, hidden): the target's, as its files have it.
    head       what gives `base`; `whole` the target's own head, with a logit for each token of the vocabulary.
    frequent   (n,): the tokens of a short head's rows, in order; None: the head has all.
    """

    about: Description
    embedding: Tensor
    tap_norms: Tensor
    fuse: Linear
    fuse_norm: Tensor
    common: Linear
    places: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    of_row: Linear
    head: Linear
    whole: Linear
    frequent: NDArray[np.int64] | None
    memory: Memory
    rates: Tensor

    def fused(self, states: Tensor) -> Tensor:
        """(n, hidden), from the target's states (n, taps · hidden)."""
        count = len(self.about.taps)
        normed = self._norm(states.view(len(states), count, -1), None) * self.tap_norms
        return self._norm(self.fuse(normed.flatten(1)), self.fuse_norm)

    def keys_values(self, fused: Tensor, places: Tensor) -> list[Tensor]:
        """Of each layer (2, n, kv_heads, head_dim): rotated keys, and values, of fused states (n, hidden) or normed
        rows at places (n,)."""
        turns = self.turns(places)
        return [self._split(layer.keys_values(fused), turns) for layer in self.layers]

    def turns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (n, head_dim / 2) of places (n,) int64."""
        turned = places.to(self.rates.device).unsqueeze(1) * self.rates
        return turned.cos(), turned.sin()

    def normed_embedding(self, ids: Tensor) -> Tensor:
        """(n, hidden) float32 of tokens (n,) int64."""
        return self._norm(self.embedding[ids].float(), None)

    def whole_logits(self, row: Floats) -> Floats:
        """(V,) on the host, of one row (hidden,), without the memory's part."""
        found: Floats = self.whole(torch.from_numpy(row[None]).to(self.embedding.device))[0].float().cpu().numpy()
        return found

    def draft(self, texts: Sequence[Seen], tokens: Sequence[int], length: int) -> list[Places]:
        """The places of drafts of so many tokens behind each text, of which the last token is given."""
        about = self.about
        ids = torch.tensor(tokens, device=self.embedding.device)
        read = torch.cat((self.normed_embedding(ids), torch.stack([text.last for text in texts])), dim=1)
        x = (self.common(read).unsqueeze(1) + self.places[:length]).flatten(0, 1)
        places = torch.cat([torch.arange(text.end, text.end + length) for text in texts])
        turns, parts = self.turns(places), [slice(i * length, (i + 1) * length) for i in range(len(texts))]
        for number, layer in enumerate(self.layers):
            normed = self._norm(x, layer.attention_norm)
            q = rotate(layer.query(normed).view(len(x), about.heads, -1), *turns)
            own = self._split(layer.keys_values(normed), turns)
            mixed = [
                self._attend(q[part], torch.cat((text.keys_values[number], own[:, part]), dim=1))
                for text, part in zip(texts, parts, strict=True)
            ]
            x = x + layer.output(torch.cat(mixed))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=1)
            x = x + layer.down(functional.silu(gate) * up)
        rows = self._norm(x, self.norm)
        found = [part.cpu().numpy() for part in (rows, self.of_row(rows), self.head(rows))]
        return [Places(*(each[part] for each in found)) for part in parts]

    def _attend(self, q: Tensor, keys_values: Tensor) -> Tensor:
        """(n, heads · head_dim), of queries (n, heads, head_dim) that see all keys and values (2, m, kv_heads, …)."""
        shared = self.about.heads // self.about.kv_heads
        k, v = (part.repeat_interleave(shared, dim=1).transpose(0, 1) for part in keys_values)
        return functional.scaled_dot_product_attention(q.transpose(0, 1), k, v).transpose(0, 1).flatten(1)

    def _split(self, found: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        k, v = found.view(len(found), 2, self.about.kv_heads, -1).unbind(1)
        return torch.stack((rotate(k, *turns), v))

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self.about.norm_eps)


def load_network(folder: Path, target: "Model") -> BlockNetwork:
    """The network in a `block/` directory, on the target's kernels.

    Raises UserError for files that are missing or damaged, for those of another target, and for a target that
    transformers runs, which gives no hidden states.
    """
    decoder = target.decoder
    if not isinstance(decoder, BaseDecoder):
        raise UserError(
            f"block reads hidden states of Specpress' own kernels, and {decoder.kernels} run this target; use another "
            "drafter"
        )
    about = read_description(folder)
    sizes = (about.hidden_size, about.vocab_size)
    if sizes != (decoder.hidden_size, decoder.vocab_size) or max(about.taps) > decoder.layers:
        raise UserError(
            f"{folder.name}: a drafter for hidden size and vocabulary {sizes} and {max(about.taps)} layers does not fit"
            f" {target.path.name}, which has {(decoder.hidden_size, decoder.vocab_size)} and {decoder.layers}; name the"
            " model that it belongs to"
        )
    require_target(about.target, folder, DESCRIPTION, target.path)
    weights = {name: tensor.to(decoder.device) for name, tensor in read_weights(folder, about).items()}
    return made(about, weights, *tables(target.path, decoder), decoder)


def tables(model: Path, decoder: BaseDecoder) -> tuple[Tensor, Tensor]:
    """The target's embedding and head (V, hidden), on its device, as its files have them."""
    checkpoint, names = open_checkpoint(model), decoder.architecture.names
    embedding = checkpoint.tensor(f"{names.embedding}.weight").to(decoder.device)
    return embedding, embedding if checkpoint.tied else _matrix(checkpoint, names.head).to(decoder.device)


def _matrix(checkpoint: Checkpoint, name: str) -> Tensor:
    found = checkpoint.weight(name)
    return found if isinstance(found, Tensor) else dequantize(found)


def made(
    about: Description, weights: dict[str, Tensor], embedding: Tensor, head: Tensor, decoder: BaseDecoder
) -> BlockNetwork:
    """The network of these weights (Description.shapes), on the kernels of its target.

    embedding, head  (V, hidden) of the target.
    """
    ids = weights.get("frequent")
    kernel, floats = decoder.kernel, {name: tensor.float() for name, tensor in weights.items() if name != "frequent"}
    normed = functional.rms_norm(embedding.float(), embedding.shape[1:], eps=about.norm_eps)
    rank, hidden, half = about.rank, about.hidden_size, about.head_dim // 2
    rates = torch.exp(-np.log(about.rope_theta) * torch.arange(half, device=decoder.device) / half)

    def layer(*names: str) -> Linear:
        return _layer(torch.cat([weights[name] for name in names]), about.scheme, kernel)

    def one(number: int) -> Layer:
        at = f"layers.{number}."
        return Layer(
            floats[f"{at}attention_norm"],
            layer(f"{at}query"),
            layer(f"{at}key", f"{at}value"),
            layer(f"{at}output"),
            floats[f"{at}mlp_norm"],
            layer(f"{at}gate", f"{at}up"),
            layer(f"{at}down"),
        )

    sure = floats["sure"].cpu().numpy()
    memory = Memory(
        _product(normed, floats["of_token"]),
        floats["of_memory"].cpu().numpy(),
        floats["gates"].cpu().numpy(),
        _product(head.float(), floats["add"].t(), torch.bfloat16),
        (sure[:hidden], sure[hidden : hidden + rank], float(sure[-2]), float(sure[-1])),
    )
    return BlockNetwork(
        about,
        embedding,
        floats["tap_norms"],
        layer("fuse"),
        floats["fuse_norm"],
        _layer(torch.cat((weights["anchor"], weights["last"]), dim=1), about.scheme, kernel),
        floats["places"],
        tuple(one(number) for number in range(about.layers)),
        floats["norm"],
        layer("of_row"),
        _layer(head if ids is None else head[ids.long()], about.head, kernel)
        if about.head or ids is not None
        else decoder.parts.head,
        decoder.parts.head,
        None if ids is None else ids.long().cpu().numpy(),
        memory,
        rates,
    )


def _layer(matrix: Tensor, scheme: str, kernel: Kernel) -> Linear:
    """A layer that holds its matrix (N, K) as the scheme says."""
    if not scheme:
        return linear(matrix, None, kernel)
    row, inputs = SCHEMES[scheme], matrix.shape[1]
    size = next((size for size in row.group_sizes if inputs % size == 0), None)
    if row.group_sizes and size is None:
        raise UserError(
            f"{DESCRIPTION}: scheme {scheme} has groups of {', '.join(map(str, row.group_sizes))} inputs, which do not "
            f"divide a matrix of {inputs}; train the drafter again with another scheme"
        )
    options = {"bits": row.bits} if row.is_grid or row.codes.has_tiles else {}
    return linear(row.codes.format.pack(matrix, row.scheme(size).group_size, **options), None, kernel)


def _product(table: Tensor, matrix: Tensor, rounded: torch.dtype = torch.float32) -> Floats:
    """(V, N) on the host, of rows (V, K) and a matrix (N, K): numbers of the type `rounded`."""
    found: Floats = np.ascontiguousarray(functional.linear(table, matrix).to(rounded).float().cpu().numpy())
    return found
