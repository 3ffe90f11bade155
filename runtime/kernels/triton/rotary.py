"""What lies between a block's first product and its attention: norms of heads, rotary positions, the cache.

One kernel: queries are rotated into memory of their own, keys are rotated, rounded and stored, values rounded and
stored. The bits are those of reference.rms_norm, reference.rotate and quantizer.CacheFormat.write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.contract import CacheBasis, CacheKind
from runtime.kernels.triton.exact import inverse_root
from runtime.kernels.triton.kv_store import writable_parts, write_key, write_value, written
from runtime.kv_store import Store


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    slots: Tensor,
    store: Store,
    layer: int,
    kind: CacheKind,
    dim: int,
    factor: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    basis: CacheBasis | None = None,
) -> Tensor:
    """Queries (T, heads, dim) float32 for `attend`; keys and values go to the store's layer.

    q, k, v   (T, heads · dim), (T, kv_heads · dim), (T, kv_heads · value_dim) float32, rows of any stride (parts of one
              product). Without keys (T, 0) nothing is stored: the layer reads another's.
    cos, sin  (P, r / 2) float32 of all positions below P (RotaryTable.upto); dimensions from r on stay.
    position  (T,) int on the device, rows of cos and sin; below 0: taken as 0.
    slots     (T,) int on the device, physical; slots given twice hold either row, or a
              mixture of both where codes share bytes.
    factor    (kv_heads, dim) float32, that keys are divided by; None: 1.
    basis     what keys and values are written in, (kv_heads, 3, d, d) each; queries stay as they are.
    q_norm, k_norm, eps  per-head RMSNorm (dim,) before the rotation; None: not normed.
    """
    rows, heads, kv_heads = q.shape[0], q.shape[1] // dim, k.shape[1] // dim
    # Compiled even where there is nothing to store.
    value_dim = v.shape[1] // kv_heads if kv_heads else dim
    out = torch.empty((rows, heads, dim), dtype=torch.float32, device=q.device)
    bases = (None, None) if basis is None else (basis.keys, basis.values)
    if rows:
        _rotate_kernel[(rows, heads + 2 * kv_heads)](
            q, k, v, out, cos, sin, position, slots, writable_parts(store, layer, kind), factor, *bases,
            q_norm, k_norm, eps, q.stride(0), k.stride(0), v.stride(0),
            HEADS=heads, HALF=cos.shape[1], KEYS=written(kind, kv_heads, dim),
            VALUES=written(kind, kv_heads, value_dim), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def _rotated(source, weight, eps, cos, sin, DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """One head's DIM numbers at `source`, normed by `weight` where there is one, and rotated: (PADDED,)."""
    d = tl.arange(0, PADDED)
    turned = d < 2 * HALF
    # The dimension that each one is rotated with.
    other = tl.where(d < HALF, d + HALF, d - HALF)
    there = turned & (other < DIM)
    x = tl.load(source + d, mask=d < DIM, other=0.0)
    y = tl.load(source + other, mask=there, other=0.0)
    if weight is not None:
        root = inverse_root(x, eps, DIM, PADDED)
        x = (x * root) * tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
        y = (y * root) * tl.load(weight + other, mask=there, other=0.0).to(tl.float32)
    angle = tl.where(d < HALF, d, d - HALF)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    along, across = x * c, y * s
    return tl.where(turned, tl.where(d < HALF, along - across, along + across), x)


@triton.jit
def _rotate_kernel(
    q, k, v, out, cos, sin, position, slots, memory, factor, key_basis, value_basis, q_norm, k_norm, eps,
    q_stride, k_stride, v_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    key_memory, value_memory, key_scale, value_scale = memory
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.maximum(tl.load(position + row).to(tl.int64), 0) * HALF
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, KEYS.padded)
    if which < HEADS:
        x = _rotated(
            q + row * q_stride + which * KEYS.dim, q_norm, eps, cos + at, sin + at, KEYS.dim, HALF, KEYS.padded
        )
        tl.store(out + (row * HEADS + which) * KEYS.dim + d, x, mask=d < KEYS.dim)
    elif which < HEADS + KEYS.kv_heads:
        head = which - HEADS
        x = _rotated(k + row * k_stride + head * KEYS.dim, k_norm, eps, cos + at, sin + at, KEYS.dim, HALF, KEYS.padded)
        if factor is not None:
            x = tl.div_rn(x, tl.load(factor + head * KEYS.dim + d, mask=d < KEYS.dim, other=1.0))
        write_key(x, key_memory, key_scale, slot, head, key_basis, KEYS)
    else:
        head = which - HEADS - KEYS.kv_heads
        source = v + row * v_stride + head * VALUES.dim
        write_value(source, value_memory, value_scale, slot, head, value_basis, VALUES)
