"""What a published draft head is, whoever wrote its file: one frozen record, and the tensors that belong to it.

Tensors are called as `speculators` calls them, and those of multi-token prediction:

embed_tokens, lm_head, norm        as in a language model; the first two may be the target's own
fc                                 the target's hidden states, side by side, to the head's
input_norm | fc_norm.I             before fc: of them all as one vector, or of each
hidden_norm                        behind fc (dflash, dspark)
join, join_token_norm, join_hidden_norm   a token's embedding and a hidden state to one vector (mtp)
layers.I                           q, k, v, o, gate, up, down and norms of a Llama or Qwen 3 block; the first one of
                                   eagle3 and peagle reads two vectors, and has a hidden_norm
d2t                                (draft vocabulary) int64: token − its place in the draft vocabulary
mask_hidden                        what stands for hidden states that are not known (peagle)
markov_head, confidence_head       dspark's
"""

from dataclasses import dataclass, field
from typing import Any, Literal

HeadKind = Literal["eagle3", "peagle", "dflash", "dspark", "mtp"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
HEAD_KINDS: tuple[HeadKind, ...] = ("eagle3", "peagle", "dflash", "dspark", "mtp")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
# EAGLE-3 reads three depths of the target where its file names none.
DEPTHS = 3
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadLayers:
    """The blocks of a head.

    hidden, heads, kv_heads, head_dim, inner, count, eps, activation   as in a Llama configuration.
    biased          the projections with a bias: of q, k, v, o, gate, up, down.
    query_key_norm  whether queries and keys are normed head by head (Qwen 3).
    gated           whether q_proj brings a gate on attention's output (Qwen 3.5).
    unit_norms      whether the files hold norms' weights less one (Qwen 3.5).
    windows         of each block the tokens that it sees; None: all.
    config          the transformers configuration of rotary positions.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    count: int
    eps: float
    activation: str
    windows: tuple[int | None, ...]
    config: Any = field(repr=False)
    biased: tuple[str, ...] = ()
    query_key_norm: bool = False
    gated: bool = False
    unit_norms: bool = False


@dataclass(frozen=True)
class HeadDescription:
    """A published head; see the papers: EAGLE-3 2503.01840, P-EAGLE 2602.01469, DFlash 2602.06036, DSpark 2607.05147.

    kind           who drafts with it.
    layout         whose files these are.
    target_hidden  size of the target's hidden states.
    vocab          of the target.
    draft_vocab    tokens that it can draft.
    depths         behind how many of the target's blocks hidden states are taken (0: the embedding); (): behind 2, half
                   of them, and all but 3, or of mtp behind the last, which it reads as the target's norm leaves it.
    normed_residual  eagle3, peagle: the first block adds to the normed hidden state (`norm_before_residual`).
    fuse_norm      what is normed before fc: "", "whole" or "each".
    normed_output  eagle3, mtp: the next step reads what the last norm gives, not what it gets (`norm_output`).
    tokens         the most that a parallel head drafts; 0: no bound.
    from_anchor    dflash, dspark: whether the text's last token has a draft behind it already; else the first is read
                   where the first mask stands.
    mask_token     stands for tokens that are not known; −1: none.
    causal         dflash, dspark: of each block whether a row of the draft sees only those before it.
    markov, rank   dspark: how a token bends the logits behind it ("" for none), and by how many numbers.
    confidence     dspark: inputs of the head that guesses how probable acceptance is; 0: none.
    """

    kind: HeadKind
    layout: str
    target_hidden: int
    vocab: int
    draft_vocab: int
    layers: HeadLayers
    depths: tuple[int, ...] = ()
    normed_residual: bool = False
    fuse_norm: Literal["", "whole", "each"] = ""
    normed_output: bool = False
    tokens: int = 0
    from_anchor: bool = False
    mask_token: int = -1
    causal: tuple[bool, ...] = ()
    markov: MarkovKind | Literal[""] = ""
    rank: int = 0
    confidence: int = 0

    def at(self, blocks: int) -> tuple[int, ...]:
        """The depths in a target of so many blocks, as `depths` has them."""
        return self.depths or ((blocks,) if self.kind == "mtp" else (2, blocks // 2, blocks - 3))

    def shapes(self) -> Shapes:
        """Every tensor that the file must have, and its shape."""
        hidden, fused = self.layers.hidden, (len(self.depths) or DEPTHS) * self.target_hidden
        found: Shapes = {"norm.weight": (hidden,)}
        if self.kind == "mtp":
            found |= {"join.weight": (hidden, 2 * hidden)}
            found |= {f"join_{part}_norm.weight": (hidden,) for part in ("token", "hidden")}
        else:
            found["fc.weight"] = (hidden, fused)
        if self.fuse_norm == "whole":
            found["input_norm.weight"] = (fused,)
        if self.fuse_norm == "each":
            found |= {f"fc_norm.{i}.weight": (self.target_hidden,) for i in range(fused // self.target_hidden)}
        if self.kind in ("dflash", "dspark"):
            found["hidden_norm.weight"] = (hidden,)
        if self.kind == "peagle":
            found["mask_hidden"] = (1, 1, fused)
        if self.draft_vocab != self.vocab:
            found |= {"d2t": (self.draft_vocab,), "lm_head.weight": (self.draft_vocab, hidden)}
        for number in range(self.layers.count):
            double = number == 0 and self.kind in ("eagle3", "peagle")
            found |= {f"layers.{number}.{name}": shape for name, shape in _block(self.layers, double).items()}
        return found | _markov(self)

    def optional(self) -> Shapes:
        """Tensors that the file may have in place of the target's own, and their shapes."""
        return {
            "embed_tokens.weight": (self.vocab, self.layers.hidden),
            "lm_head.weight": (self.draft_vocab, self.layers.hidden),
            "d2t": (self.draft_vocab,),
        }


def _block(a: HeadLayers, double: bool) -> Shapes:
    """The tensors of a block; double: it reads a token's embedding beside the hidden state."""
    read, of_values = a.hidden * (2 if double else 1), a.kv_heads * a.head_dim
    outputs = {"q": a.heads * a.head_dim, "k": of_values, "v": of_values, "o": a.hidden}
    outputs |= {"gate": a.inner, "up": a.inner, "down": a.hidden}
    inputs = {"q": read, "k": read, "v": read, "o": outputs["q"], "gate": a.hidden, "up": a.hidden, "down": a.inner}
    if a.gated:
        outputs["q"] *= 2
    found: Shapes = {}
    for part, inner in inputs.items():
        name = f"{'self_attn' if part in 'qkvo' else 'mlp'}.{part}_proj"
        found[f"{name}.weight"] = (outputs[part], inner)
        if part in a.biased:
            found[f"{name}.bias"] = (outputs[part],)
    norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if double else [])]
    found |= {f"{name}.weight": (a.hidden,) for name in norms}
    if a.query_key_norm:
        found |= {f"self_attn.{part}_norm.weight": (a.head_dim,) for part in "qk"}
    return found


def _markov(d: HeadDescription) -> Shapes:
    found: Shapes = {}
    if d.markov:
        found["markov_head.markov_w1.weight"] = (d.vocab, d.rank)
        found["markov_head.markov_w2.weight"] = (d.draft_vocab, d.rank)
    name, outputs, inputs = {
        "gated": ("gate_proj", d.rank, d.layers.hidden + d.rank),
        "rnn": ("joint_proj", 3 * d.rank, 2 * d.rank + d.layers.hidden),
    }.get(d.markov, ("", 0, 0))
    if name:
        found |= {f"markov_head.{name}.weight": (outputs, inputs), f"markov_head.{name}.bias": (outputs,)}
    if d.confidence:
        found |= {"confidence_head.proj.weight": (1, d.confidence), "confidence_head.proj.bias": (1,)}
    return found
