"""Ternary weights without training by two planes, W ≈ s1·T1 + s2·T2, beside what else takes 3 to 4 bits a weight.

    .venv/bin/python examples/compare/two_planes.py --threads 1

Two ternary planes with two scales a row give nine levels: 3.17 bits a weight as numbers to base 9, 4 as two planes of
two bits each. Scales are fitted to the weights by alternating least squares, codes chosen with GPTQ's error feedback,
scales fitted again to the layer's outputs, and codes once more. A second row has the first scale three times the
second: nine evenly spaced levels. Prints KL and perplexity of the built-in pair on held-out text, float activations;
layers are rounded block by block, each block on what those before it have left.
"""

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compress import Recipe
from compress.context import RunContext
from compress.logits import kl_rows, log_probabilities, token_nll
from compress.pipeline.inputs import open_inputs
from compress.quantize import gptq, trellis
from compress.quantize.grid import Grid
from runtime.formats import dequantize

Round = Callable[[Sequence[Tensor], Tensor], list[Tensor]]
# Both codes of each level.
FIRST = torch.tensor([-1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
SECOND = torch.tensor([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0])
# The layers of a block by the input that they read.
TOGETHER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def two_planes(weight: Tensor, hessian: Tensor, ratio: float | None) -> Tensor:
    """(N, K) float32: a weight (N, K) as the sum of two ternary planes; `hessian` (K, K) is the mean of x xᵀ.

    ratio  of the first scale to the second; None: whatever fits each row.
    """
    factor, _, ridge = gptq.factorize(hessian, None, 0.01)
    raised = hessian + ridge * torch.eye(len(hessian))
    scales = _fitted(weight, _start(weight), ratio, torch.diag(raised.diagonal()))
    for _ in range(2):
        codes = _fed_back(weight, scales, factor)
        scales = _scales(weight, codes, ratio, raised)
    codes = _fed_back(weight, scales, factor)
    return _values(codes, scales)


def _start(weight: Tensor) -> Tensor:
    """(N, 2): scales whose nine levels spread over a row of normal weights."""
    size = weight.square().mean(1, keepdim=True).sqrt()
    return torch.cat([1.5 * size, 0.5 * size], dim=1)


def _fitted(weight: Tensor, scales: Tensor, ratio: float | None, importance: Tensor) -> Tensor:
    """Alternating least squares: the nearest levels by the scales, the best scales by the levels."""
    for _ in range(12):
        scales = _scales(weight, _nearest(weight, scales), ratio, importance)
    return scales


def _nearest(values: Tensor, scales: Tensor) -> Tensor:
    """Places (N, …) among the nine levels nearest to values (N, …)."""
    levels = scales[:, :1] * FIRST + scales[:, 1:] * SECOND
    return (values.unsqueeze(-1) - levels.view(len(values), *[1] * (values.ndim - 1), 9)).abs().argmin(-1)


def _scales(weight: Tensor, codes: Tensor, ratio: float | None, metric: Tensor) -> Tensor:
    """(N, 2): the scales of least error e · metric · e of each row, for levels `codes` (N, K)."""
    planes = torch.stack([FIRST[codes], SECOND[codes]])
    if ratio is not None:
        planes = (ratio * planes[0] + planes[1]).unsqueeze(0)
    weighed = planes @ metric
    left = torch.einsum("pnk,qnk->npq", weighed, planes)
    right = torch.einsum("pnk,nk->np", weighed, weight)
    left = left + 1e-6 * left.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(len(planes))
    found = torch.linalg.solve(left, right.unsqueeze(-1)).squeeze(-1)
    found = found if ratio is None else torch.cat([ratio * found, found], dim=1)
    return found.bfloat16().float()


def _fed_back(weight: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Levels (N, K) of each column in turn: nearest to the weight and what the columns before have left."""
    error, codes = torch.zeros_like(weight), torch.empty(weight.shape, dtype=torch.int64)
    for column in range(weight.shape[1]):
        target = weight[:, column] + error[:, :column] @ factor[:column, column]
        codes[:, column] = _nearest(target, scales)
        level = scales[:, 0] * FIRST[codes[:, column]] + scales[:, 1] * SECOND[codes[:, column]]
        error[:, column] = weight[:, column] - level
    return codes


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    return scales[:, :1] * FIRST[codes] + scales[:, 1:] * SECOND[codes]


def each(weights: Sequence[Tensor], hessian: Tensor, ratio: float | None) -> list[Tensor]:
    """`two_planes` of layers that read one input."""
    return [two_planes(weight, hessian, ratio) for weight in weights]


def by_gptq(weights: Sequence[Tensor], hessian: Tensor, grid: Grid) -> list[Tensor]:
    """Integers, as the recipes int4-gptq and int3-gptq choose them."""
    found = gptq.quantize_together(weights, hessian, grid, torch.bfloat16, order=True)
    return [dequantize(one.packed) for one in found]


def by_trellis(weights: Sequence[Tensor], hessian: Tensor, bits: int) -> list[Tensor]:
    """A trellis, without the recipe's factors."""
    return [dequantize(one.packed) for one in trellis.quantize_together(weights, hessian, bits, torch.bfloat16)]


def rounded(model: Any, windows: Tensor, how: Round) -> Any:
    """A copy of the model, its blocks' linear layers rounded block after block, each on what those before have left."""
    model = copy.deepcopy(model)
    for block in model.model.layers:
        layers = [[block.get_submodule(name) for name in names] for names in TOGETHER]
        for group, hessian in zip(layers, _hessians(model, windows, [group[0] for group in layers]), strict=True):
            for layer, weight in zip(group, how([layer.weight.detach() for layer in group], hessian), strict=True):
                layer.weight.data.copy_(weight)
    return model


def _hessians(model: Any, windows: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """(K, K) of each layer's input."""
    found: list[Tensor] = [torch.zeros(())] * len(layers)

    def watch(number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = given[0].flatten(0, 1)
            found[number] = found[number] + x.T @ x / windows.numel()

        return look

    hooks = [layer.register_forward_pre_hook(watch(number)) for number, layer in enumerate(layers)]
    for window in windows.split(4):
        model.model(window, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def measured(model: Any, original: Any, windows: Tensor) -> tuple[float, float]:
    """Mean KL(original ‖ model), nats a token, and the model's perplexity."""
    divergence = loss = 0.0
    count = windows.numel() - len(windows)
    for window in windows.split(1):
        ours, theirs = (log_probabilities(one(window, use_cache=False).logits[0, :-1]) for one in (model, original))
        divergence += float(kl_rows(theirs, ours).sum())
        loss += float(token_nll(ours, window[0, 1:]).sum())
    return divergence / count, math.exp(loss / count)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="windows to calibrate on")
    parser.add_argument("--eval-tokens", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    context = RunContext.of(Recipe.load("int4-gptq"), samples=asked.samples, eval_tokens=asked.eval_tokens, speed=False)
    inputs = open_inputs(context)
    windows = inputs.text.windows
    original = AutoModelForCausalLM.from_pretrained(inputs.target.path, dtype=torch.float32).eval()
    ways: dict[str, tuple[float, Round]] = {
        "two ternary planes": (math.log2(9), lambda weights, hessian: each(weights, hessian, None)),
        "the same, evenly spaced": (math.log2(9), lambda weights, hessian: each(weights, hessian, 3.0)),
        "int3, groups of 128": (3.125, lambda weights, hessian: by_gptq(weights, hessian, Grid(3, 128))),
        "int4, groups of 128": (4.125, lambda weights, hessian: by_gptq(weights, hessian, Grid(4, 128))),
        "trellis-3": (3.0, lambda weights, hessian: by_trellis(weights, hessian, 3)),
    }
    table = Table("weights", "bits", "KL, nats", "perplexity")
    table.add_row("as they are", "16", "0", f"{measured(original, original, windows.evaluation)[1]:.3f}")
    for name, (bits, how) in ways.items():
        divergence, perplexity = measured(rounded(original, windows.calibration, how), original, windows.evaluation)
        table.add_row(name, f"{bits:.2f}", f"{divergence:.4f}", f"{perplexity:.3f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
