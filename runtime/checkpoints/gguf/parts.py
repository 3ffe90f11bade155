"""Where each tensor of a model is in a GGUF file: names and layouts, out of the model's record.

What differs besides names: the order of rows (rotated neighbours, queries, keys and values of groups of heads), norms
that are stored with the 1 added that transformers adds when it runs, experts in stacks, and latent attention's layer,
which is two tensors.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from runtime.checkpoints.gguf.names import EMBEDDING, HEAD, LAYER_TABLE, Form
from runtime.checkpoints.gguf.part import Names, Numbers, Order, Part
from runtime.checkpoints.gguf.state_parts import convolution, delta, mamba
from runtime.checkpoints.mixers import Latent
from runtime.checkpoints.record import Architecture, Beside, Experts


def parts(a: Architecture, form: Form, held: Collection[str] = ()) -> Iterator[Part]:
    """The tensors of a model, in llama.cpp's usual order; `held` are the checkpoint's names, where it has old ones."""
    names = Names(form)
    n = a.names
    yield Part(EMBEDDING, (f"{n.embedding}.weight",))
    if n.positions is not None:
        yield Part("position_embd.weight", (f"{n.positions}.weight",), vector=True)
    if a.layer_input:
        yield Part(LAYER_TABLE, (f"{n.layer_table}.weight",))
        yield Part("per_layer_model_proj.weight", (f"{n.layer_projection}.weight",))
        yield from names.norm(a, "per_layer_proj_norm", n.layer_norm)
    for part in names.layer("output", n.head):
        if part.bias or not a.tied:
            yield part
        elif form.head == "always":
            yield Part(HEAD, (f"{n.embedding}.weight",))
    yield from names.norm(a, "output_norm", n.norm)
    for number in range(a.layers):
        yield from _block(Names(form, f"blk.{number}.", f"{n.block.format(number)}."), a, number, held)


def alternatives(a: Architecture, form: Form) -> Iterator[Part]:
    """Tensors that other writers have in place of some of `parts`: gates and factors of experts in one stack."""
    if a.experts is None or not a.gated:
        return
    for number in range(a.layers):
        names = Names(form, f"blk.{number}.", f"{a.names.block.format(number)}.")
        stacks = [part for part in _mixture(names, a, a.experts, ()) if part.stacked]
        for half, there in enumerate(("ffn_gate_exps", "ffn_up_exps")):
            part = next(one for one in stacks if one.tensor == f"{names.tensor(there)}.weight")
            yield replace(part, tensor=f"{names.tensor('ffn_gate_up_exps')}.weight", half=half)


# αₙ and αₚ of xIELU, β and ε (2411.13010): their names in the file and in a checkpoint, shapes, and usual values.
_XIELU: tuple[tuple[str, str, tuple[int, ...], float | None], ...] = (
    ("xielu.alpha_n", "alpha_n", (1,), None),
    ("xielu.alpha_p", "alpha_p", (1,), None),
    ("xielu.beta", "beta", (), 0.5),
    ("xielu.eps", "eps", (), -1e-6),
)


def numbers(a: Architecture) -> Iterator[Numbers]:
    """The tensors of a model that a file has in its metadata."""
    if a.activation == "xielu":
        for key, name, shape, default in _XIELU:
            each = tuple(f"{a.names.block.format(layer)}.mlp.act_fn.{name}" for layer in range(a.layers))
            yield Numbers(key, each, shape, default)


def _block(names: Names, a: Architecture, number: int, held: Collection[str]) -> Iterator[Part]:
    n = a.names
    # Falcon's two norms before attention and MLP stand the other way round.
    first, second = ("attn_norm_2", "attn_norm") if n.input_norm == "ln_attn" else ("attn_norm", "ffn_norm")
    yield from names.norm(a, first, n.input_norm)
    if n.mlp_norm != n.input_norm and number not in a.without_mlp:
        yield from names.norm(a, second, n.mlp_norm)
    yield from names.norm(a, "post_attention_norm", n.attention_norm)
    yield from names.norm(a, "post_ffw_norm", n.output_norm)
    if a.layer_input:
        yield from names.layer("inp_gate", n.layer_gate)
        yield from names.layer("proj", n.layer_out)
        yield from names.norm(a, "post_norm", n.layer_out_norm)
    if n.block_scale is not None:
        yield Part(f"{names.tensor('layer_output_scale')}.weight", (f"{names.here}{n.block_scale}",), vector=True)
    yield from _mixer(names, a, number)
    if number in a.without_mlp:
        return
    if a.experts is None or number in a.dense_layers:
        yield from _mlp(names, a)
    else:
        if a.experts.beside is not None:
            yield from _mlp(names, a)
            yield from _beside(names, a, a.experts.beside)
        yield from _mixture(names, a, a.experts, held)


def _beside(names: Names, a: Architecture, how: Beside) -> Iterator[Part]:
    """What a mixture beside an MLP has for itself."""
    yield Part(f"{names.tensor('ffn_gate_inp')}.scale", (f"{names.here}{how.router_scale}",), vector=True)
    yield Part(f"{names.tensor('ffn_down_exps')}.scale", (f"{names.here}{how.expert_scale}",), vector=True)
    yield from names.norm(a, "post_ffw_norm_1", how.mlp_output_norm)
    yield from names.norm(a, "pre_ffw_norm_2", how.input_norm)
    yield from names.norm(a, "post_ffw_norm_2", how.output_norm)


def _mixer(names: Names, a: Architecture, number: int) -> Iterator[Part]:
    """What mixes a row with those before it."""
    kind = a.mixers[number] if a.mixers else "attention"
    if kind.startswith("attention"):
        yield from _attention(names, a, number) if a.latent is None else _latent(names, a, a.latent)
    if kind == "convolution":
        yield from convolution(names, a)
    if kind == "delta":
        assert a.delta is not None
        yield from delta(names, a, a.delta)
    if kind.endswith("mamba"):
        assert a.mamba is not None
        yield from mamba(names, a.mamba)


def _attention(names: Names, a: Architecture, number: int) -> Iterator[Part]:
    n, turned = a.names, _turned(a)
    shares = a.source(number) != number
    swapped = names.form.neighbours and not a.rotary_neighbours
    if len(n.qkv) == 1:
        yield from names.layer("attn_qkv", n.qkv[0], ungrouped(a) if a.grouped_rows else None, turned)
    else:
        made = 1 if shares else 2 if number in a.keys_as_values else 3
        layers = list(zip(("attn_q", "attn_k", "attn_v"), n.qkv, (a.heads, a.kv_heads, 0), strict=True))
        for part, name, heads in layers[:made]:
            yield from names.layer(part, name, neighbours(heads * a.head_dim, heads) if swapped and heads else None)
    yield from names.layer("attn_output", n.out, turned=turned)
    if a.query_key_norm and a.query_key_weights:
        norms = (("attn_q_norm", n.query_norm, a.heads), ("attn_k_norm", n.key_norm, a.kv_heads))
        for part, name, heads in norms[: 1 if shares else 2]:
            if a.query_key_span == "each head" and "{}" in name:
                each = tuple(f"{names.here}{name.format(head)}.weight" for head in range(heads))
                yield Part(f"{names.tensor(part)}.weight", each, stacked=True, vector=True)
            else:
                yield from names.norm(a, part, name)
    if a.sinks:
        yield Part(f"{names.tensor('attn_sinks')}.weight", (names.here + n.sinks,), vector=True)


def _latent(names: Names, a: Architecture, how: Latent) -> Iterator[Part]:
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


def _mlp(names: Names, a: Architecture) -> Iterator[Part]:
    own = (*a.names.gate_up, a.names.down)
    yield from _layers(names, a, ("ffn_gate", "ffn_up", "ffn_down"), own, a.intermediate)


def _layers(
    names: Names, a: Architecture, there: tuple[str, str, str], own: tuple[str, ...], size: int
) -> Iterator[Part]:
    """The layers `own` of an MLP of `size` channels; one of gates and factors may be two there."""
    turned = _turned(a)
    if a.gated and len(own) == 2 and not names.form.fused:
        for part, rows in zip(there, np.arange(2 * size).reshape(2, -1), strict=False):
            yield Part(f"{names.tensor(part)}.weight", (f"{names.here}{own[0]}.weight",), rows=rows)
    else:
        for part, name in zip(there[3 - len(own) :], own[:-1], strict=False):
            yield from names.layer(part, name, turned=turned)
    yield from names.layer(there[-1], own[-1], turned=turned)


def _mixture(names: Names, a: Architecture, experts: Experts, held: Collection[str]) -> Iterator[Part]:
    places = [(f"{names.here}{name}".removesuffix("."), router) for name in experts.names for router in experts.routers]
    base, router = next((place for place in places if f"{'.'.join(place)}.weight" in held), places[0])
    prefix = Names(names.form, names.there, f"{base}.")
    yield from prefix.layer("ffn_gate_inp", router, vector=True)
    old = any(name.startswith(f"{base}.experts.0.w1.") for name in held)
    own = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    for part, name in zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), own, strict=True):
        if a.gated or name != own[0]:
            yield from prefix.stack(part, base, experts.count, name)
    if experts.correction is not None:
        yield Part(f"{names.tensor('exp_probs_b')}.bias", (f"{base}.{experts.correction}",), vector=True)
    if experts.shared:
        shared = (*experts.shared_gate_up, experts.shared_down)
        there = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
        yield from _layers(names, a, there, shared, experts.shared)
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
