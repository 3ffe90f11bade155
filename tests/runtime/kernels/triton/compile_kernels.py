"""Compiles the linear kernels for a GPU that is not there: Triton's compiler and NVIDIA's assembler need none.

`python compile_kernels.py 90 [all]` prints a line of JSON for each kernel that a forward would launch. A process of its
own, because Triton decides once whether it interprets.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from runtime.formats import fp8
from runtime.formats.packed import PackedWeight, Scheme
from runtime.kernels.triton import quantize_inputs, tile_sizes
from runtime.kernels.triton.argmax import route
from runtime.kernels.triton.expert_rows import Picks
from runtime.kernels.triton.linear import TritonLinear, triton_linear
from runtime.kernels.triton.weights import gpu_weight
from runtime.model.triton.experts import StackedLinear, add_experts

# Kind, K, group, whether it has zero points and an order: one of each way through the kernels.
FEW = [
    ("int8", 4096, 0, False),
    ("int4", 8192, 128, True),
    ("nf4", 4096, 64, False),
    ("planes", 4096, 0, False),
    ("bfloat16", 4096, 0, False),
    ("fp8", 4096, 0, False),
]
MORE = [
    ("int8", 4096, 128, False),
    ("int4", 4096, 32, False),
    ("int4", 4096, 512, True),
    ("int4", 4096, 0, False),
    ("ternary", 4096, 0, False),
    ("ternary", 4096, 256, False),
    ("upper", 4096, 0, False),
    ("float16", 4096, 0, False),
    ("float32", 4096, 0, False),
    ("bfloat16", 4104, 0, False),
]


class Absent:
    """A driver that knows which GPU to compile for, and nothing else."""

    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Nothing is launched on it."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self.target


def report(kernel: Any, name: str) -> dict[str, Any]:
    """What the compiler made of a kernel."""
    ptx = kernel.asm["ptx"]
    return {
        "kernel": name,
        "shared": kernel.metadata.shared,
        "stages": kernel.metadata.num_stages,
        "tensor_cores": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.[\w.]+", ptx))),
        "contracted": len(re.findall(r"fma\.rn", ptx)),
        # Subnormals flushed in floor (cvt.rmi) do no harm: exp asks for floors of k + 0.5 alone.
        "approximate": len(re.findall(r"\.approx|div\.full|(?<!rmi)\.ftz", ptx)),
        "asynchronous": ptx.count("cp.async.c"),
        "waits": len(re.findall(r"tt\.load", _loops(kernel.asm["ttgir"]))),
        "bytes": len(kernel.asm["cubin"]),
    }


def _loops(ttgir: str) -> str:
    """The text of the innermost loops."""
    return "\n".join(re.findall(r"scf\.for(?:(?!scf\.for).)*?scf\.yield", ttgir, re.DOTALL))


def layers(cases: list[tuple[str, int, int, bool]], plans: dict[str, tile_sizes.Plan]) -> Iterator[TritonLinear]:
    """Layers of 256 outputs."""
    generator = torch.Generator().manual_seed(0)
    for kind, k, group, rest in cases:
        if hasattr(torch, kind) and getattr(torch, kind) in (torch.bfloat16, torch.float16, torch.float32):
            weight: PackedWeight | torch.Tensor = torch.randn(256, k, generator=generator).to(getattr(torch, kind))
        elif kind == "fp8":
            weight = fp8.pack(torch.randn(256, k, generator=generator))
        else:
            stored = "int8" if kind in ("planes", "upper") else kind
            scale = torch.rand(256, k // group if group else 1, generator=generator)
            low, high = {"nf4": (0, 16), "int4": (-8, 8)}.get(stored, (-1, 2))
            weight = PackedWeight(
                Scheme(stored, 4, group, not rest, "int8-group"),  # type: ignore[arg-type]
                torch.randint(low, high, (256, k), generator=generator, dtype=torch.int8),
                scale,
                offset=scale if rest else None,
                perm=torch.randperm(k, generator=generator) if rest else None,
                planes=kind in ("planes", "upper"),
            )
        laid_out = gpu_weight(weight, None, "cpu")
        layer = triton_linear(laid_out, plans.get(laid_out.kind, plans["float" if laid_out.cut is None else "integer"]))
        yield layer.upper() if kind == "upper" else layer
        if layer.plan.few is not None and cases is not FEW:
            yield replace(layer, plan=replace(layer.plan, narrow=layer.plan.few))


def main(capability: int, everything: bool) -> None:
    """Compiles and prints."""
    driver.set_active(Absent(capability))
    run, seen = jit.JITFunction.run, set()

    def compile_only(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *values, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            # A kernel that finds the rows of experts reads their numbers.
            picked = any(isinstance(v, torch.Tensor) and v.dtype == torch.int64 for v in values)
            print(json.dumps(report(kernel, self.fn.__name__) | {"picked": picked}), flush=True)
        return kernel

    jit.JITFunction.run = compile_only
    # As on a GPU, whatever the tensors' device.
    tile_sizes.rows_at_once = lambda device: 1
    plans = next(plans for least, plans in tile_sizes.PLANS.items() if capability >= 10 * least[0] + least[1])
    for number, layer in enumerate(layers(FEW + MORE if everything else FEW, plans)):
        for rows in (1, 40, 80) if everything else (1, 80) if number < 2 else (1,):
            x = torch.zeros(rows, layer.weight.shape[1])
            layer(x)
            if rows > tile_sizes.MANY:
                continue
            picks = Picks(torch.zeros((rows, 2), dtype=torch.int64))
            experts = StackedLinear(layer, by_expert=rows == 1 and layer.weight.perm is not None)
            experts(x, picks)
            experts.after(*[torch.zeros(2 * rows, layer.weight.shape[1])] * 2, "silu", picks)
            if layer.how is not None and rows == 1 and number < 2:
                add_experts(torch.zeros(2, 512), torch.zeros(1, 2), picks, torch.zeros(1, 512))
                route(torch.zeros(1, 60), 4, True, torch.zeros(1, dtype=torch.int32))
                quantize_inputs.gated_quantize(x, x, "silu", layer.how)
                quantize_inputs.norm_quantize(x, x[0], 1e-5, layer.how)
                if everything:
                    quantize_inputs.gated_quantize(x, x, "gelu_tanh", layer.how)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] == ["all"])
