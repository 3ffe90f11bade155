"""Before the work starts: what it will take of memory, disk and time, and whether that is there.

A forecast counts what is large (weights in float32, statistics, activations, files) and adds what the process holds
already. It is rough on purpose and a little on the safe side; nothing in the report comes from it.
"""

import math
import re
import shutil
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from calib.moments import Moments
from compress.calibration.activations import matmul_precision
from compress.errors import UserError
from compress.model.plan import Plan
from compress.model.source import Source
from compress.model.structure import ModelStructure
from compress.pipeline.sequential import BlockPlan
from compress.quantize import rtn
from compress.quantize.trellis import PASSES
from runtime.checkpoints.architecture import describe
from runtime.formats import schemes
from runtime.formats.schemes import SCHEMES
from runtime.formats.trellis import LEVELS, TILE, empty_tiles
from runtime.machine import free_memory
from runtime.native.trellis import encode_tiles

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*")
_FLOAT, _DOUBLE = 4, 8
# Copies of the largest layer that an algorithm works with, and of its statistics (factors of a Hessian in float64).
_LAYER_COPIES, _HESSIAN_COPIES = 5, 4
# Of the speed of one large product: attention, norms and elementwise work are slower.
_EFFICIENCY = 0.5
# Products of a layer's weights with its Hessian: half of one for the first codes, one for each pass over them, and what
# scales are found by.
_PRODUCTS = 3
_DISK_RATE = 300e6
_TRIES = 6
# What takes less memory, by the stage that takes the most ("": blocks and their text).
_WITHIN = "in a copy of the recipe give it a smaller training.batch"
_SMALLER = {
    "": "take a recipe that looks at no text",
    "learn": f"{_WITHIN}, gradient_checkpointing: true or rounding: false, leave the stage out",
    "ternary": f"{_WITHIN} or gradient_checkpointing: true, take another scheme",
    "qat": f"{_WITHIN} or gradient_checkpointing: true, take a quantize stage instead",
    "heal": f"{_WITHIN}, leave the stage out",
    "draft": f"{_WITHIN}, leave the stage out",
    "medusa": f"{_WITHIN} or fewer heads, leave the stage out",
    "block_draft": f"{_WITHIN} or fewer anchors, leave the stage out",
}


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    memory   bytes at the most, with activations in their file; `held`: what they take besides when kept in memory.
    disk     bytes that the partial folder grows to.
    seconds  of the work on the weights; quality and speed are measured after it.
    training  seconds of all stages that train.
    largest  kind of the stage that trains in all of that memory; "": it is the work on the weights that takes it.
    """

    memory: int
    held: int
    disk: int
    seconds: float
    training: float = 0.0
    largest: str = ""

    def line(self, mapped: bool) -> str:
        """The forecast for people."""
        where = "" if not self.held else ", activations in a file" if mapped else ", activations in memory"
        memory = self.memory + (0 if mapped else self.held)
        return (
            f"forecast: {shown(memory)} of memory{where}, {shown(self.disk)} of disk while it works, "
            f"about {shown_time(self.seconds)} for the weights"
            + (f" and {shown_time(self.training)} of training" if self.training else "")
        )


def parse_size(text: str, option: str = "--memory-budget") -> int:
    """Bytes of "4GB", "512 MiB" or "1000000". Raises UserError for anything else, naming the option."""
    found = _SIZE.fullmatch(text)
    if not found or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise UserError(f"{option}: expected a size such as 4GB or 512MiB, found {text!r}: correct it")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def forecast(source: Source, plan: Plan, blocks: BlockPlan | None, copied: int = 0) -> Forecast:
    """What a run will take.

    plan    of what is packed in the end; blocks: of the first pass over blocks, None where there is none.
    copied  bytes of files that are copied beside (a draft).
    """
    shapes, itemsize = source.shapes(), source.item_sizes()
    numbers = {name: math.prod(shape) for name, shape in shapes.items()}
    stored = {name: stored_bytes(name, shapes[name], itemsize[name], plan) for name in shapes}
    sizes = [sum(numbers[name] for name in names) for _, names in plan.parts]
    kept = [sum(stored[name] for name in names) for _, names in plan.parts]
    largest = max(numbers.values(), default=0)
    # Tensor by tensor: the weight, its float32 form and codes, and what the part has become so far.
    memory = max(kept, default=0) + largest * (2 * _FLOAT + 1)
    held, flops = 0, 0.0
    if blocks is not None:
        weights = [size for size, (_, names) in zip(sizes, plan.parts, strict=True) if blocks.number(names) is not None]
        moments = max((_moments_bytes(blocks, number) for number in blocks.wants), default=0)
        layers = [numbers[name] for name in plan.layers] or [largest]
        wanted = ((number, path) for number, wants in blocks.wants.items() for path in wants if wants[path].hessian)
        factor = max((_inputs(blocks, *place) for place in wanted), default=0) ** 2 * _FLOAT
        memory = max(weights, default=0) * (_FLOAT + 1) + max(kept, default=0) + moments
        memory += max(layers) * _FLOAT * _LAYER_COPIES + factor * _HESSIAN_COPIES
        if blocks.reads_text:
            windows, length = blocks.tokens.shape
            windows *= 2 if blocks.twins else 1
            held = windows * length * _numbers_of_token(blocks.loader.structure.text_config) * _FLOAT
            memory += _window_bytes(blocks, length)
            # Once for the statistics and once for the next block's inputs.
            passes = (2 if blocks.wants else 0) + (1 if blocks.depth is not None else 0)
            flops = passes * 2.0 * sum(weights) * windows * length + _algorithm_flops(blocks)
    total = sum(stored.values())
    disk = 2 * total + copied + 2 * held
    moved = sum(numbers[name] * itemsize[name] for name in shapes) + 3 * total + 2 * held * max(len(plan.parts), 1)
    rounded = sum(numbers[name] for name in plan.layers)
    seconds = compute_seconds(flops) + rounded * _seconds_per_weight(plan) + moved / _DISK_RATE
    return Forecast(memory + resident(), held, disk, seconds)


def with_rotation(need: Forecast, source: Source, structure: ModelStructure, untied: bool) -> Forecast:
    """The forecast of a run that puts the model into another basis first: a plain copy, a block of it at a time.

    untied  whether the embedding is in that copy twice.
    """
    itemsize = source.item_sizes()
    numbers = {name: math.prod(shape) for name, shape in source.shapes().items()}
    blocks: dict[int, int] = {}
    for name, count in numbers.items():
        if (number := structure.block(name)) is not None:
            blocks[number] = blocks.get(number, 0) + count
    largest = max(numbers.values())
    # A block in float32 and as it will be stored; a tensor in float64, before, within and after each product.
    memory = max(blocks.values()) * 2 * _FLOAT + largest * 3 * _DOUBLE
    copy = sum(count * itemsize[name] for name, count in numbers.items()) + (largest * _FLOAT if untied else 0)
    memory = int(memory + resident())
    return replace(
        need,
        memory=max(need.memory, memory),
        largest=need.largest if need.memory >= memory else "",
        disk=need.disk + 2 * copy,
        seconds=need.seconds + 4 * copy / _DISK_RATE,
    )


def _numbers_of_token(config: Any) -> int:
    """Of what goes into a block, at the most: hidden states, the blocks' own inputs, and keys and values that are
    shared (compress/calibration/carried.py)."""
    found = describe(config.to_dict())
    if found is None:
        return int(config.hidden_size)
    read = {source for n in range(found.layers) if (source := found.source(n)) != n}
    shared = sum(2 * found.shape(n).kv_heads * found.shape(n).head_dim for n in read)
    return found.hidden + found.layers * found.layer_input + shared


def check(need: Forecast, folder: Path, budget: int | None) -> bool:
    """Whether activations are to stay in their file. Raises UserError where the run cannot fit, in one sentence.

    folder  the partial folder; what it holds already counts for it. budget: bytes of memory; None: what is free.
    """
    have = budget if budget is not None else available()
    if have is not None and need.memory > have:
        given = "--memory-budget allows" if budget is not None else "are free"
        where = f" for its stage {need.largest}" if need.largest else ""
        raise UserError(
            f"this run needs about {shown(need.memory)} of memory{where} and {shown(have)} {given}: "
            f"{'raise it' if budget is not None else 'free some'}, {_SMALLER.get(need.largest, _SMALLER[''])}, or take "
            "a smaller model"
        )
    there = next(path for path in (folder, *folder.parents) if path.exists())
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
    free = shutil.disk_usage(there).free + used
    if need.disk > free:
        raise UserError(
            f"{folder}: this run needs about {shown(need.disk)} of disk while it works, and {shown(free)} are "
            "free: free some or choose another place with --out"
        )
    return have is not None and need.memory + need.held > have


def available() -> int | None:
    """Bytes of memory that this process can have, with what it holds; None where the system does not tell."""
    free = free_memory()
    return None if free is None else free + resident()


def resident() -> int:
    """Bytes of anonymous memory that this process holds; 0 where the system does not tell."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def stored_bytes(name: str, shape: Sequence[int], itemsize: int, plan: Plan) -> int:
    """What a tensor takes as the plan stores it; `itemsize` bytes a number where it stays as it is."""
    layer, numbers = plan.layers.get(name), math.prod(shape)
    if layer is None:
        return numbers * itemsize
    outputs, inputs = (shape[1], shape[0]) if layer.transposed else shape
    return schemes.stored_bytes(SCHEMES[layer.scheme].scheme(layer.group_size, layer.symmetric), outputs, inputs)


def _moments_bytes(blocks: BlockPlan, number: int) -> int:
    """Statistics of a block; layers that share an input share them, so this is rather too much."""
    # q, k and v (gate and up) read one input: of those with equally many inputs in one module, one is counted.
    seen: dict[tuple[str, int], int] = {}
    for path, want in blocks.wants[number].items():
        inputs = _inputs(blocks, number, path)
        with torch.device("meta"):
            seen[path.rpartition(".")[0], inputs] = Moments(inputs, want).nbytes
    return sum(seen.values())


def _inputs(blocks: BlockPlan, number: int, path: str) -> int:
    return blocks.meta_blocks[number].linears[path].in_features


def _algorithm_flops(blocks: BlockPlan) -> float:
    """Hessians, one for layers that share an input, and what GPTQ, SparseGPT and a trellis do with them."""
    total = 0.0
    tokens = blocks.tokens.numel()
    for number, wants in blocks.wants.items():
        seen = set()
        for path, want in wants.items():
            if want.hessian:
                linear = blocks.meta_blocks[number].linears[path]
                k, n = linear.in_features, linear.out_features
                total += _PRODUCTS * 2.0 * n * k * k
                # As _moments_bytes: q, k and v read one input. Of the Hessian one half is computed.
                if (shared := (path.rpartition(".")[0], k)) not in seen:
                    seen.add(shared)
                    total += 1.0 * tokens * k * k + 2.0 * k**3
    return total


def _window_bytes(blocks: BlockPlan, length: int) -> int:
    """What one window's forward through a block holds: a few rows of the widest layer, and attention's scores."""
    config = blocks.loader.structure.text_config
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    first = next(iter(blocks.wants), 0)
    linears = [blocks.meta_blocks[first].linears[path] for path in blocks.wants.get(first, {})]
    widest = max((max(linear.in_features, linear.out_features) for linear in linears), default=0)
    return _FLOAT * length * (6 * widest + heads * length)


def compute_seconds(flops: float) -> float:
    """What so many floating-point operations take in float32 on this machine, now."""
    if not flops:
        return 0.0
    a, b = torch.ones(512, 512), torch.ones(512, 512)
    with matmul_precision():
        rate = 2 * 512**3 / _shortest(lambda: a @ b)
    return flops / (rate * _EFFICIENCY)


def _seconds_per_weight(plan: Plan) -> float:
    """What choosing its code takes for a weight on this machine, now, but for products with a Hessian."""
    layer = next(iter(plan.layers.values()), None)
    if layer is None:
        return 0.0
    row = SCHEMES[layer.scheme]
    if row.codes.has_tiles:
        return _seconds_per_state(row.bits)
    # Rounding in any other form takes about as long.
    sample, scheme = torch.ones(512, 512), layer.scheme if layer.scheme in ("nf4", "int8-dynamic") else "int4"
    group = (SCHEMES[scheme].group_sizes or (0,))[0]
    return _shortest(lambda: rtn.quantize(sample, scheme, group)) / sample.numel()


def _seconds_per_state(bits: int) -> float:
    """What Viterbi's algorithm takes for a weight of a trellis: once, and again in each pass."""
    weights = torch.randn(TILE, 1024, generator=torch.Generator().manual_seed(0))
    carried, scale, found = torch.zeros(weights.shape), torch.full((1024,), 0.02), torch.empty(weights.shape).char()
    corner, spreads, tiles = torch.eye(TILE), torch.ones(TILE), empty_tiles(1024, TILE, bits)[:, 0]

    def encode(again: bool) -> None:
        encode_tiles(bits, LEVELS[bits], weights, carried, scale, corner, spreads, tiles, found, again=again)

    first = _shortest(lambda: encode(False))
    return (first + PASSES[bits] * _shortest(lambda: encode(True))) / weights.numel()


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of the quickest of some tries: beside other programs a single one can take twenty times as long."""
    return max(min(timeit.repeat(work, number=1, repeat=_TRIES)), 1e-9)


def shown(size: float) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def shown_time(seconds: float) -> str:
    """Seconds, minutes or hours for people."""
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
