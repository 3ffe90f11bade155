"""Where each tensor of a model is in a GGUF file: names and layouts, out of the model's record.

What differs besides names: the order of rows (rotated neighbours, queries, keys and values of groups of heads), norms
that are stored with the 1 added that transformers adds when it runs, experts in stacks, and latent attention's layer,
which is two tensors.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoints.gguf.names import EMBEDDING, HEAD, Form
from runtime.checkpoints.mixers import DeltaNet, Latent
from runtime.checkpoints.record import Architecture, Experts

Order = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor of a GGUF file.

    names     transformers' tensors that it holds: one, or one for each expert or head of a stack.
    stacked   each of them is an element of its first dimension.
    rows      row i is transformers' row rows[i]; None: the rows are in transformers' order. Where several parts have
              one name, each has some of its rows.
    columns   of a matrix, as `rows`.
    offset    what is added to the values there.
    logarithm transformers' values are x where -exp(x) is there.
    shape     transformers' shape, where it is another.
    turned    "matrix": transformers' is (inputs, outputs). "heads": of each head the rows are columns there.
    vector    float32 always, as llama.cpp wants it.
    bias      it may be missing.
    """

    tensor: str
    names: tuple[str, ...]
    stacked: bool = False
    rows: Order | None = None
    columns: Order | None = None
    offset: float = 0.0
    logarithm: bool = False
    shape: tuple[int, ...] | None = None
    turned: Literal["matrix", "heads"] | None = None
    heads: int = 1
    vector: bool = False
    bias: bool = False


def parts(a: Architecture, form: Form, held: Collection[str] = ()) -> Iterator[Part]:
    """The tensors of a model, in llama.cpp's usual order; `held` are the checkpoint's names, where it has old ones."""
    names = _Names(form)
    n = a.names
    yield Part(EMBEDDING, (f"{n.embedding}.weight",))
    if n.positions is not None:
        yield Part("position_embd.weight", (f"{n.positions}.weight",), vector=True)
    if not a.tied:
        yield from names.layer("output", n.head)
    elif form.head == "always":
        yield Part(HEAD, (f"{n.embedding}.weight",))
    yield from names.norm(a, "output_norm", n.norm)
    for number in range(a.layers):
        yield from _block(_Names(form, f"blk.{number}.", f"{n.block.format(number)}."), a, number, held)


@dataclass(frozen=True)
class _Names:
    """Names of parts in a block of a file (`there`) and of a checkpoint (`here`)."""

    form: Form
    there: str = ""
    here: str = ""

    def tensor(self, part: str) -> str:
        return self.there + self.form.renamed.get(part, part)

    def layer(
        self,
        part: str,
        name: str,
        rows: Order | None = None,
        turned: Literal["matrix"] | None = None,
        vector: bool = False,
    ) -> Iterator[Part]:
        """A layer and its bias."""
        there, here = self.tensor(part), self.here + name
        yield Part(f"{there}.weight", (f"{here}.weight",), rows=rows, turned=turned, vector=vector)
        yield Part(f"{there}.bias", (f"{here}.bias",), rows=rows, vector=True, bias=True)

    def norm(self, a: Architecture, part: str, name: str | None, offset: float | None = None) -> Iterator[Part]:
        """A norm and its bias; nothing for None."""
        if name is None:
            return
        there, here = self.tensor(part), self.here + name
        yield Part(
            f"{there}.weight", (f"{here}.weight",), offset=a.norm_offset if offset is None else offset, vector=True
        )
        yield Part(f"{there}.bias", (f"{here}.bias",), vector=True, bias=True)

    def stack(self, part: str, base: str, count: int, name: str) -> Iterator[Part]:
        """A layer of every expert, and their biases."""
        for kind in ("weight", "bias"):
            each = tuple(f"{base}.experts.{i}.{name}.{kind}" for i in range(count))
            bias = kind == "bias"
            yield Part(f"{self.tensor(part)}.{kind}", each, stacked=True, vector=bias, bias=bias)


def _block(names: _Names, a: Architecture, number: int, held: Collection[str]) -> Iterator[Part]:
    n = a.names
    # Falcon's two norms before attention and MLP stand the other way round.
    first, second = ("attn_norm_2", "attn_norm") if n.input_norm == "ln_attn" else ("attn_norm", "ffn_norm")
    yield from names.norm(a, first, n.input_norm)
    if n.mlp_norm != n.input_norm:
        yield from names.norm(a, second, n.mlp_norm)
    yield from names.norm(a, "post_attention_norm", n.attention_norm)
    yield from names.norm(a, "post_ffw_norm", n.output_norm)
    if number not in a.attending:
        yield from _convolution(names, a) if a.delta is None else _delta(names, a, a.delta)
    elif a.latent is not None:
        yield from _latent(names, a, a.latent)
    else:
        yield from _attention(names, a)
    if a.experts is None or number in a.dense_layers:
        yield from _mlp(names, a)
    else:
        yield from _mixture(names, a.experts, held)


def _attention(names: _Names, a: Architecture) -> Iterator[Part]:
    n, turned = a.names, _turned(a)
    swapped = names.form.neighbours and not a.rotary_neighbours
    if len(n.qkv) == 1:
        yield from names.layer("attn_qkv", n.qkv[0], ungrouped(a) if a.grouped_rows else None, turned)
    else:
        for part, name, heads in zip(("attn_q", "attn_k", "attn_v"), n.qkv, (a.heads, a.kv_heads, 0), strict=True):
            yield from names.layer(part, name, neighbours(heads * a.head_dim, heads) if swapped and heads else None)
    yield from names.layer("attn_output", n.out, turned=turned)
    if a.query_key_norm and a.query_key_weights:
        for part, name, heads in (("attn_q_norm", n.query_norm, a.heads), ("attn_k_norm", n.key_norm, a.kv_heads)):
            if a.query_key_span == "each head":
                each = tuple(f"{names.here}{name.format(head)}.weight" for head in range(heads))
                yield Part(f"{names.tensor(part)}.weight", each, stacked=True, vector=True)
            else:
                yield from names.norm(a, part, name)
    if a.sinks:
        yield Part(f"{names.tensor('attn_sinks')}.weight", (names.here + n.sinks,), vector=True)


def _latent(names: _Names, a: Architecture, how: Latent) -> Iterator[Part]:
    """Latent attention, whose layer of keys and values is two tensors; that of the keys lies the other way round."""
    if how.query_rank is None:
        yield from names.layer("attn_q", how.query)
    else:
        yield from names.layer("attn_q_a", how.query_compressed)
        yield from names.norm(a, "attn_q_a_norm", how.query_norm, 0.0)
        yield from names.layer("attn_q_b", how.query_expand)
    yield from names.layer("attn_kv_a_mqa", how.compressed)
    yield from names.norm(a, "attn_kv_a_norm", how.norm, 0.0)
    rows = np.arange(a.heads * (how.plain + how.value)).reshape(a.heads, -1)
    whole = (f"{names.here}{how.expand}.weight",)
    keys, values = rows[:, : how.plain].reshape(-1), rows[:, how.plain :].reshape(-1)
    yield Part(f"{names.tensor('attn_k_b')}.weight", whole, rows=keys, turned="heads", heads=a.heads)
    yield Part(f"{names.tensor('attn_v_b')}.weight", whole, rows=values, heads=a.heads)
    yield from names.layer("attn_output", a.names.out)


def _convolution(names: _Names, a: Architecture) -> Iterator[Part]:
    how = a.convolution
    assert how is not None
    yield from names.layer("shortconv.in_proj", how.into)
    yield from names.layer("shortconv.out_proj", how.out)
    there, here = names.tensor("shortconv.conv"), names.here + how.filter
    yield Part(f"{there}.weight", (f"{here}.weight",), shape=(a.hidden, 1, how.taps), vector=True)
    yield Part(f"{there}.bias", (f"{here}.bias",), vector=True, bias=True)


def _delta(names: _Names, a: Architecture, how: DeltaNet) -> Iterator[Part]:
    """A delta rule: what its layers make lies as queries, keys and values, and their gates apart."""
    heads = np.arange(how.value_heads)
    per = how.value_heads // how.key_heads
    if names.form.tiled:
        heads = heads.reshape(how.key_heads, per).swapaxes(0, 1).reshape(-1)
    values = (heads[:, None] * how.value + np.arange(how.value)).reshape(-1)
    channels = np.concatenate((np.arange(how.channels - how.values), how.channels - how.values + values))
    if how.grouped:
        sizes = np.cumsum([how.key, how.key, per * how.value])
        rows = np.arange(how.channels + how.values).reshape(how.key_heads, -1)
        *qkv, gates = (part.reshape(-1) for part in np.split(rows, sizes, axis=1))
        whole = (f"{names.here}{how.into[0]}.weight",)
        yield Part(f"{names.tensor('attn_qkv')}.weight", whole, rows=np.concatenate(qkv))
        yield Part(f"{names.tensor('attn_gate')}.weight", whole, rows=gates)
        yield from names.layer("ssm_ba", how.into[1])
    else:
        layers = zip(("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha"), how.into, strict=True)
        for (part, name), rows in zip(layers, (channels, values, heads, heads), strict=True):
            yield from names.layer(part, name, rows)
    filtered = (f"{names.here}{how.filter}.weight",)
    shape = (how.channels, 1, how.taps)
    yield Part(f"{names.tensor('ssm_conv1d')}.weight", filtered, rows=channels, shape=shape, vector=True)
    yield Part(f"{names.tensor('ssm_dt')}.bias", (names.here + how.step,), rows=heads, vector=True)
    yield Part(names.tensor("ssm_a"), (names.here + how.rate,), rows=heads, logarithm=True, vector=True)
    yield from names.norm(a, "ssm_norm", how.norm, 0.0)
    out = (f"{names.here}{how.out}.weight",)
    yield Part(f"{names.tensor('ssm_out')}.weight", out, columns=values if names.form.tiled else None)


def _mlp(names: _Names, a: Architecture) -> Iterator[Part]:
    layers = ("ffn_gate", "ffn_up") if len(a.names.gate_up) == 2 else ("ffn_up",)
    for part, name in zip((*layers, "ffn_down"), (*a.names.gate_up, a.names.down), strict=True):
        yield from names.layer(part, name, turned=_turned(a))


def _mixture(names: _Names, experts: Experts, held: Collection[str]) -> Iterator[Part]:
    places = [(f"{names.here}{name}", router) for name in experts.names for router in experts.routers]
    base, router = next((place for place in places if f"{'.'.join(place)}.weight" in held), places[0])
    prefix = _Names(names.form, names.there, f"{base}.")
    yield from prefix.layer("ffn_gate_inp", router, vector=True)
    old = any(name.startswith(f"{base}.experts.0.w1.") for name in held)
    own = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    for part, name in zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), own, strict=True):
        yield from prefix.stack(part, base, experts.count, name)
    if experts.correction is not None:
        yield Part(f"{names.tensor('exp_probs_b')}.bias", (f"{base}.{experts.correction}",), vector=True)
    if experts.shared:
        shared = (*experts.shared_gate_up, experts.shared_down)
        for part, name in zip(("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), shared, strict=True):
            yield from names.layer(part, name)
    if experts.shared_gate is not None:
        gate = (f"{base}.{experts.shared_gate}.weight",)
        yield Part(f"{names.tensor('ffn_gate_inp_shexp')}.weight", gate, shape=(1, -1), vector=True)


def _turned(a: Architecture) -> Literal["matrix"] | None:
    return "matrix" if a.transposed else None


def neighbours(rows: int, heads: int) -> Order:
    """(rows,) the rows of transformers' heads, whose halves rotate together, in the order in which neighbours do.

    Raises ValueError for odd heads.
    """
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows are no {heads} heads of an even size")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def ungrouped(a: Architecture) -> Order:
    """The rows of queries, keys and values that stand key head by key head: all queries, all keys, all values."""
    per = a.heads // a.kv_heads
    rows = np.arange((a.heads + 2 * a.kv_heads) * a.head_dim).reshape(a.kv_heads, per + 2, a.head_dim)
    return np.concatenate([part.reshape(-1) for part in (rows[:, :per], rows[:, per], rows[:, per + 1])])
