"""What a block does between its products: norms, activations, the embedding. The bits of kernels/reference.py.

Single IEEE operations in the reference's order, launched without contraction; a program works on one row, and nothing
in it is specialised to the number of rows.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.kernels.triton.exact import gelu_tanh, inverse_root, sigmoid, silu

Activation = Literal["silu", "gelu_tanh"]
# Elements of one program where rows are cut.
_PIECE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """reference.rms_norm of x (T, K) float32, rows of any stride, by weight (K,) of any float dtype: (T, K) float32."""
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        warps = 4 if block <= 4096 else 8
        _norm_kernel[(rows,)](
            x, weight, out, x.stride(0), eps, offset, width, BLOCK=block, num_warps=warps, enable_fp_fusion=False
        )
    return out


def gated(gate: Tensor, up: Tensor, activation: Activation | Literal["sigmoid"]) -> Tensor:
    """activation(gate) · up, (T, N) float32 of rows of any stride."""
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=torch.float32, device=gate.device)
    if rows:
        grid = (rows, triton.cdiv(width, _PIECE))
        strides = gate.stride(0), up.stride(0)
        _activation_kernel[grid](gate, up, out, *strides, width, KIND=activation, PIECE=_PIECE, enable_fp_fusion=False)
    return out


def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float, gate_first: bool) -> Tensor:
    """Rows x (T, G · K) float32, contiguous, normed in groups of K, and times SiLU of their gates before that or after.

    gates (T, G · K) float32 of any stride; weight (G, K) float32, or (1, K) for all groups.
    """
    rows, values = x.shape
    width = weight.shape[1]
    out = torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        warps = 1 if block <= 512 else 4 if block <= 4096 else 8
        _gated_norm_kernel[(rows, values // width)](
            x, gates, weight, out, gates.stride(0), eps, values, 0 if len(weight) == 1 else width, width,
            FIRST=gate_first, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def embed(tokens: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows (T, K) float32 of table (V, K), of any float dtype, times `scale`; tokens (T,) int, below 0: 0."""
    width = table.shape[1]
    out = torch.empty((len(tokens), width), dtype=torch.float32, device=table.device)
    if len(tokens):
        grid = (len(tokens), triton.cdiv(width, _PIECE))
        _embed_kernel[grid](tokens, table, out, scale, width, table.stride(0), PIECE=_PIECE, enable_fp_fusion=False)
    return out


@triton.jit
def _norm_kernel(x, weight, out, x_stride, eps, offset, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    v = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    by = tl.where(offset != 0.0, by + offset, by)
    tl.store(out + row * width + at, (v * inverse_root(v, eps, width, BLOCK)) * by, mask=inside)


@triton.jit
def _activation_kernel(gate, up, out, gate_stride, up_stride, width, KIND: tl.constexpr, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < width
    x = tl.load(gate + row * gate_stride + at, mask=inside, other=0.0)
    x = sigmoid(x) if KIND == "sigmoid" else gelu_tanh(x) if KIND == "gelu_tanh" else silu(x)
    by = tl.load(up + row * up_stride + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, x * by, mask=inside)


@triton.jit
def _gated_norm_kernel(
    x, gates, weight, out, gates_stride, eps, values, weight_stride, width, FIRST: tl.constexpr, BLOCK: tl.constexpr
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < width
    v = tl.load(x + row * values + group * width + at, mask=inside, other=0.0)
    factor = silu(tl.load(gates + row * gates_stride + group * width + at, mask=inside, other=0.0))
    by = tl.load(weight + group * weight_stride + at, mask=inside, other=0.0)
    if FIRST:
        v = factor * v
    v = (v * inverse_root(v, eps, width, BLOCK)) * by
    if not FIRST:
        v = factor * v
    tl.store(out + row * values + group * width + at, v, mask=inside)


@triton.jit
def _embed_kernel(tokens, table, out, scale, width, stride, PIECE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    inside = at < width
    token = tl.maximum(tl.load(tokens + row).to(tl.int64), 0)
    x = tl.load(table + token * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, x * scale, mask=inside)
