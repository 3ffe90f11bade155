"""Tile sizes of the linear kernels, tried one by one: the figures for runtime/kernels/triton/tile_sizes.py."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from runtime.bench.kernels import copies_of, each
from runtime.bench.layers import layers
from runtime.bench.measure import Bench, Place
from runtime.bench.random_models import random_weight

if TYPE_CHECKING:
    from runtime.kernels.triton.tile_sizes import Tiles

# Outputs of a program and stages, of narrow tiles and of wide ones, which have a number of warps, too.
_NARROW, _WIDE, _WARPS = ((16, 32, 64), (2, 3, 4, 6)), ((64, 128), (3, 4)), (4, 8)
# What an interpreter tries: enough to see that the command works.
_TOY = ((32, 64), (1,))


def candidates(first: "Tiles", narrow: bool, place: Place) -> Iterator["Tiles"]:
    """Tiles to try around a plan's own."""
    outputs, stages = (_NARROW if narrow else _WIDE) if place.is_gpu else _TOY
    for block_n, stage, warps in product(outputs, stages, (first.warps,) if narrow or not place.is_gpu else _WARPS):
        yield replace(first, block_n=block_n, stages=stage, warps=warps)


def time_tiles(bench: Bench, shape: str, schemes: Sequence[str], widths: Sequence[int]) -> None:
    """Rows: for each scheme, layer and width the candidates by their time, quickest first.

    Widths up to `tile_sizes.MANY` try the narrow tiles, wider ones the wide tiles. What a GPU
    refuses (too much shared memory) is left out with that reason.
    """
    from runtime.kernels.triton.linear import triton_linear
    from runtime.kernels.triton.tile_sizes import MANY, plan
    from runtime.kernels.triton.weights import gpu_weight

    place = bench.place
    place.require_triton("tune")
    for scheme in schemes:
        for layer in layers(shape, scheme, "keep")[:-1]:
            bench.say(f"{scheme}, {layer.name}")
            drawn = random_weight(scheme, layer.outputs, layer.inputs, torch.Generator(place.device).manual_seed(0))
            first = gpu_weight(drawn, None, place.device)
            more = copies_of(place, first.nbytes) - 1
            weights = [first, *(gpu_weight(drawn, None, place.device) for _ in range(more))]
            own = plan(first.kind, place.device)
            for width in widths:
                narrow = width <= MANY
                x = torch.randn(width, layer.inputs, device=place.device)
                tasks: dict[Tiles, Callable[[], float]] = {}
                for tiles in candidates(own.narrow if narrow else own.wide, narrow, place):
                    plan_tried = replace(own, narrow=tiles) if narrow else replace(own, wide=tiles)
                    tried = [triton_linear(w, plan_tried) for w in weights]
                    try:
                        rounded = tried[0].round(x)
                        run = place.repeated(partial(each, [one.product for one in tried], rounded))
                    except Exception as error:  # the compiler's own classes, which share none but this
                        bench.leave_out(error, **_about(scheme, layer.name, width, tiles))
                        continue
                    tasks[tiles] = place.task(run, calls=len(weights))
                timed = {key: median(s.seconds for s in taken) for key, taken in bench.samples(tasks).items()}
                for tiles, took in sorted(timed.items(), key=lambda item: item[1]):
                    speed = {"ms_median": took * 1e3, "gb_per_second": first.nbytes / took / 1e9}
                    bench.rows.append(_about(scheme, layer.name, width, tiles) | speed)
                place.release()


def _about(scheme: str, layer: str, width: int, tiles: "Tiles") -> dict[str, Any]:
    return {
        "scheme": scheme, "layer": layer, "width": width,
        "block_n": tiles.block_n, "warps": tiles.warps, "stages": tiles.stages,
    }  # fmt: skip
