"""Compiles the kernels of attention and what lies around it for a GPU that is not there, as compile_kernels.py does.

`python compile_attention.py 90 [all]` prints a line of JSON for each.
"""

import json
import sys
from dataclasses import replace
from typing import Any, get_args

import torch
from compile_kernels import Absent, report
from triton.runtime import driver, jit

from runtime.contract import FLOATS, CacheBasis, CacheKind
from runtime.kernels.triton import argmax, convolution, delta, elementwise, state_space
from runtime.kernels.triton.attention_decode import Heads, Places, attend
from runtime.kernels.triton.attention_prefill import attend_many
from runtime.kernels.triton.basis import turn_back
from runtime.kernels.triton.kv_store import move
from runtime.kernels.triton.rotary import rotate_and_store
from runtime.kernels.triton.row_states import Walk
from runtime.kv_store import IN_BASIS, allocate

# Kind, dimensions of keys and of values, heads, window, cap, sinks: one of each way through the kernels.
Case = tuple[CacheKind, int, int, int, int | None, float, bool]
FEW: list[Case] = [
    ("int4", 32, 32, 4, 100, 50.0, True),
    ("int3", 32, 32, 2, None, 0.0, False),
]
MORE: list[Case] = [
    *((kind, dim, dim, 4, None, 0.0, False) for kind in get_args(CacheKind) for dim in (64, 80, 128, 256)),
    ("float32", 128, 128, 20, None, 0.0, False),
    ("float32", 256, 256, 2, 4096, 50.0, False),
    ("float16", 64, 64, 8, 128, 0.0, True),
    *((kind, 576, 512, 16, None, 0.0, False) for kind in get_args(CacheKind)),
    ("float32", 512, 512, 4, None, 0.0, False),
    ("int8", 512, 512, 4, None, 0.0, False),
]


def attention(
    kind: CacheKind, dim: int, value_dim: int, heads: int, window: int | None, softcap: float, sinks: bool
) -> None:
    """Chains, trees and prompts of two heads of keys, one split and several; rows on their way into the cache."""
    store = allocate(kind, 1, 2, 2, dim, torch.device("cpu"), value_dim)
    factor = None if kind in FLOATS else torch.ones(2, dim)
    beside = torch.zeros(2 * heads) if sinks else None
    shape = Heads(2 * heads, 2, dim, 1.0, window, factor, False, value_dim, softcap, beside)
    ints = torch.zeros(4, dtype=torch.int32)
    q = torch.zeros(4, 2 * heads, dim)
    tail = ints.view(4, 1)
    chain, tree = (Places(ints.view(2, 2), ints, ints, ints, part) for part in (None, tail))
    attend(q, store, 0, kind, shape, chain, 2, sharing=4)
    attend(q, store, 0, kind, shape, tree, 1)
    attend_many(q, store, 0, kind, shape, chain)
    flat, angle, keys, values = (
        q.flatten(1),
        torch.zeros(9, dim // 2),
        *(torch.zeros(4, 2 * d) for d in (dim, value_dim)),
    )
    where, norm = (angle, angle, ints, ints, store, 0, kind, dim, factor), torch.zeros(dim)
    rotate_and_store(flat, keys, values, *where, norm, norm, 1e-6)
    if sinks:
        # A layer that reads another's keys.
        rotate_and_store(flat, keys[:, :0], keys[:, :0], *where, norm, None, 1e-6)
    if kind in IN_BASIS:
        basis = CacheBasis(*(torch.zeros(2, 3, d, d) for d in (dim, value_dim)))
        rotate_and_store(flat, keys, values, *where[:-1], None, norm, norm, 1e-6, basis)
        turn_back(q, basis.keys)
        turned = replace(shape, factor=None, in_basis=True)
        attend(q, store, 0, kind, turned, tree, 2, sharing=4)
        attend_many(q, store, 0, kind, turned, chain)
    move(store, kind, ints, ints)


def states(key: int, value: int, taps: int) -> None:
    """Layers that carry a state, of two heads of these sizes."""
    walk = Walk(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64))
    made, heads = torch.zeros(2, 2 * key + 2 * value), torch.zeros(2, 2)
    vectors, table = torch.zeros(4, max(key, 2)), torch.zeros(taps, made.shape[1])
    convolution.gated_convolution(made, made, made, table, table[0], walk, 0)
    convolution.filtered(made, table, None, walk, 0)
    weights = heads[0], heads[0], vectors[0, :key], vectors[0, :key]
    delta.delta_rule(made, heads, heads, weights, 1, value, walk, 64)
    state_space.state_space(made, heads, (heads[0],) * 3, (0.0, float("inf")), 1, key, walk, 64)
    for first in (True, False):
        elementwise.gated_norm(made, made, torch.zeros(2, key + value), 1e-6, first)


def main(capability: int, everything: bool) -> None:
    """Compiles and prints."""
    driver.set_active(Absent(capability))
    run, seen = jit.JITFunction.run, set()

    def compile_only(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *values, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps(report(kernel, self.fn.__name__)), flush=True)
        return kernel

    jit.JITFunction.run = compile_only
    x, token = torch.zeros(2, 2048), torch.zeros(2, dtype=torch.int64)
    elementwise.rms_norm(x, x[0], 1e-5)
    elementwise.gated(x, x, "silu")
    elementwise.gated(x, x, "gelu_tanh")
    elementwise.gated(x, x, "sigmoid")
    elementwise.embed(token, x)
    argmax.largest(x)
    argmax.route(x[:, :60], 6, True)
    for case in FEW + MORE if everything else FEW:
        attention(*case)
    for sizes in ((128, 128, 4), (256, 64, 3), (20, 12, 2)) if everything else ((128, 128, 4),):
        states(*sizes)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["all"])
