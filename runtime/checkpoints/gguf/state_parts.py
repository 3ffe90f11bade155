"""Where the tensors of layers with a state in attention's place, or beside it, are in a GGUF file."""

from collections.abc import Iterator

import numpy as np

from runtime.checkpoints.gguf.part import Names, Part
from runtime.checkpoints.mixers import DeltaNet, Mamba
from runtime.checkpoints.record import Architecture


def convolution(names: Names, a: Architecture) -> Iterator[Part]:
    how = a.convolution
    assert how is not None
    yield from names.layer("shortconv.in_proj", how.into)
    yield from names.layer("shortconv.out_proj", how.out)
    there, here = names.tensor("shortconv.conv"), names.here + how.filter
    yield Part(f"{there}.weight", (f"{here}.weight",), shape=(a.hidden, 1, how.taps), vector=True)
    yield Part(f"{there}.bias", (f"{here}.bias",), vector=True, bias=True)


def delta(names: Names, a: Architecture, how: DeltaNet) -> Iterator[Part]:
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


def mamba(names: Names, how: Mamba) -> Iterator[Part]:
    """A state space; what each head has one of lies as a column there, and its norm group by group."""
    own = Names(names.form, names.there, f"{names.here}{how.name}.")
    yield from own.layer("ssm_in", "in_proj")
    filtered, there = f"{own.here}conv1d", own.tensor("ssm_conv1d")
    shape = (how.channels, 1, how.taps)
    yield Part(f"{there}.weight", (f"{filtered}.weight",), shape=shape, vector=True)
    yield Part(f"{there}.bias", (f"{filtered}.bias",), vector=True, bias=True)
    yield Part(f"{own.tensor('ssm_dt')}.bias", (f"{own.here}dt_bias",), vector=True)
    one, column = (how.heads,), (how.heads, 1)
    rate, skip = (own.here + "A_log",), (own.here + "D",)
    yield Part(own.tensor("ssm_a"), rate, logarithm=True, vector=True, shape=one, there=column)
    yield Part(own.tensor("ssm_d"), skip, vector=True, shape=one, there=column)
    if how.norm != "none":
        groups = (how.groups, how.values // how.groups)
        weight = (f"{own.here}norm.weight",)
        yield Part(f"{own.tensor('ssm_norm')}.weight", weight, vector=True, shape=(how.values,), there=groups)
    yield from own.layer("ssm_out", "out_proj")
