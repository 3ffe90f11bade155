"""`load_head`: a published head's folder becomes a head on the target's kernels, or is refused in a sentence."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.checkpoints.heads.open import PublishedHead, open_head
from runtime.checkpoints.heads.record import HeadDescription, HeadKind
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.rotation import rotation_of
from runtime.errors import UserError
from runtime.kernels.dispatch import Kernel, join, linear
from runtime.kernels.joined import Linear
from runtime.model.base import BaseDecoder
from runtime.model.rotary import RotaryTable
from runtime.model.tensor_reader import TensorReader
from runtime.speculative.heads.blocks import HeadBlock
from runtime.speculative.heads.markov import Confidence, Markov
from runtime.speculative.heads.network import Head
from runtime.speculative.heads.own_layer import OwnLayer, own_layer

if TYPE_CHECKING:
    from runtime.model.load import Model


def load_head(folder: Path, kind: HeadKind, target: "Model") -> Head:
    """The head in a folder, for a target on Specpress' own kernels.

    Raises UserError for files that are missing, damaged or of another layout or kind, for a head that was made for
    another target (its hidden size, its vocabulary, layers that the target has not), for a target that others run, and
    for one whose hidden states are rotated.
    """
    decoder = target.decoder
    if not isinstance(decoder, BaseDecoder):
        raise UserError(
            f"{kind} reads the target's hidden states, which only Specpress' own kernels give, and {decoder.kernels} "
            "run this target; use another drafter"
        )
    published = open_head(folder, kind)
    rotation = rotation_of(open_checkpoint(target.path).config)
    if rotation is not None and rotation.residual:
        raise UserError(
            f"{folder.name}: the head reads hidden states as the original has them, and those of {target.path.name} "
            "are rotated; use another drafter, or a target of a recipe with residual: false under rotate"
        )
    require_target(published.about, folder.name, target.path.name, decoder)
    layer = own_layer(folder, published.own_block, target) if published.own_block else None
    return _Maker(published, decoder).head(target.path, layer)


def require_target(about: HeadDescription, name: str, target: str, decoder: BaseDecoder) -> None:
    """Raises UserError unless a head's sizes, tokens and layers are those of the target; name and target: to show."""
    sizes = (about.target_hidden, about.vocab)
    if sizes != (decoder.hidden_size, decoder.vocab_size):
        raise UserError(
            f"{name}: a head for hidden states and a vocabulary of {sizes} does not fit {target}, which has "
            f"{(decoder.hidden_size, decoder.vocab_size)}; name the model that it belongs to"
        )
    depths = about.at(decoder.layers)
    if not all(0 <= depth <= decoder.layers for depth in depths) or len(set(depths)) < len(depths):
        raise UserError(
            f"{name}: the head reads hidden states behind {', '.join(map(str, depths))} layers, and {target} has "
            f"{decoder.layers}; name the model that it belongs to"
        )
    if about.kind == "mtp" and decoder.architecture.norm == "layer":
        raise UserError(f"{name}: multi-token prediction follows an RMS norm, and {target} ends with another")
    if about.mask_token >= about.vocab:
        raise UserError(
            f"{name}: the mask token {about.mask_token} is beyond the vocabulary of {about.vocab}; fetch the file again"
        )


class _Maker:
    """Makes layers of a head's tensors on the target's kernels and device."""

    def __init__(self, published: PublishedHead, decoder: BaseDecoder) -> None:
        self._about, self._decoder = published.about, decoder
        self._tensors: Mapping[str, Tensor] = {
            name: tensor.to(decoder.device) for name, tensor in published.tensors.items()
        }

    def head(self, target: Path, layer: OwnLayer | None) -> Head:
        """The whole head; target: where the embeddings are, should neither head nor decoder have them."""
        about, kernel = self._about, self._decoder.kernel
        table, scale = self._embeddings(target)
        read = {"whole": ["input_norm"], "each": [f"fc_norm.{i}" for i in range(len(about.at(self._decoder.layers)))]}
        mtp = about.kind == "mtp"
        final = (self._decoder.parts.norm.weight, self._decoder.architecture.norm_eps)
        unknown = self._tensors.get("mask_hidden")
        return Head(
            about,
            tuple(self._block(number, kernel) for number in range(about.layers.count)),
            None if layer else RotaryTable(about.layers.config, self._decoder.device, head_dim=about.layers.head_dim),
            table,
            scale,
            self._projection(),
            self._norm("norm"),
            fc=None if mtp else self._linear("fc"),
            fuse_norms=tuple(self._norm(name) for name in read.get(about.fuse_norm, [])),
            fused_norm=self._norm("hidden_norm") if "hidden_norm.weight" in self._tensors else None,
            join=self._linear("join") if mtp else None,
            join_norms=tuple(self._norm(f"join_{part}_norm") for part in ("token", "hidden")) if mtp else (),
            final_norm=final if mtp else None,
            tokens=self._tokens(),
            unknown=None if unknown is None else unknown.float().view(1, -1),
            markov=self._markov(),
            confidence=self._confidence(),
            own_layer=layer,
        )

    def _linear(self, name: str) -> Linear:
        bias = self._tensors.get(f"{name}.bias")
        weight = self._tensors[f"{name}.weight"]
        return linear(weight, None if bias is None else bias.float(), self._decoder.kernel)

    def _norm(self, name: str) -> Tensor:
        weight = self._tensors[f"{name}.weight"].float()
        return weight + 1 if self._about.layers.unit_norms else weight

    def _block(self, number: int, kernel: Kernel) -> HeadBlock:
        a, place = self._about.layers, f"layers.{number}"
        double = f"{place}.hidden_norm.weight" in self._tensors
        names = [f"{place}.mlp.{part}_proj" for part in ("gate", "up")]
        biases = [self._tensors.get(f"{name}.bias") for name in names]
        gate_up = join(
            [self._tensors[f"{name}.weight"] for name in names],
            [None if bias is None else bias.float() for bias in biases],
            [a.inner, a.inner],
            kernel,
        )
        q, k, v, o = (self._linear(f"{place}.self_attn.{part}_proj") for part in "qkvo")
        return HeadBlock(
            (q, k, v),
            o,
            gate_up,
            self._linear(f"{place}.mlp.down_proj"),
            self._norm(f"{place}.input_layernorm"),
            self._norm(f"{place}.post_attention_layernorm"),
            self._norm(f"{place}.self_attn.q_norm") if a.query_key_norm else None,
            self._norm(f"{place}.self_attn.k_norm") if a.query_key_norm else None,
            self._norm(f"{place}.hidden_norm") if double else None,
            self._about.normed_residual,
        )

    def _embeddings(self, target: Path) -> tuple[Tensor, float]:
        """The table and what its rows are multiplied by: the head's own, or the target's."""
        about, decoder = self._about, self._decoder
        own = self._tensors.get("embed_tokens.weight")
        if own is not None:
            return own, 1.0
        if about.layers.hidden != decoder.hidden_size:
            raise UserError(
                f"the head's hidden size is {about.layers.hidden} and the target's {decoder.hidden_size}, so that it "
                "needs embeddings of its own, but embed_tokens.weight is not there; fetch the file again"
            )
        table = decoder.parts.embedding
        if table is None:
            # A tied table lies in the target's output layer, as its kernels want it.
            a = decoder.architecture
            reader = TensorReader(open_checkpoint(target), decoder.kernel, decoder.device, False, a)
            table = reader.table(f"{a.names.embedding}.weight", (a.vocab, a.hidden)).clone()
        return table, decoder.architecture.embedding_scale

    def _projection(self) -> Linear:
        if "lm_head.weight" in self._tensors:
            return self._linear("lm_head")
        if self._about.layers.hidden != self._decoder.hidden_size:
            raise UserError(
                f"the head's hidden size is {self._about.layers.hidden} and the target's {self._decoder.hidden_size}, "
                "so that it needs an output layer of its own, but lm_head.weight is not there; fetch the file again"
            )
        return self._decoder.parts.head

    def _tokens(self) -> Tensor | None:
        """The target's token of each place in the draft vocabulary."""
        found = self._tensors.get("d2t")
        if found is None:
            return None
        tokens = found.long() + torch.arange(len(found), device=found.device)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._about.vocab:
            raise UserError(f"d2t names tokens beyond the vocabulary of {self._about.vocab}; fetch the file again")
        return tokens

    def _markov(self) -> Markov | None:
        kind = self._about.markov
        if not kind:
            return None
        bend = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
        table = self._tensors["markov_head.markov_w1.weight"].float()
        made = None if bend is None else self._linear(f"markov_head.{bend}")
        return Markov(kind, table, self._linear("markov_head.markov_w2"), made)

    def _confidence(self) -> Confidence | None:
        if not self._about.confidence:
            return None
        weight, bias = (self._tensors[f"confidence_head.proj.{part}"].float() for part in ("weight", "bias"))
        return Confidence(weight, bias)
