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

# Outputs of a program, warps, stages, and programs for each multiprocessor: 24 to compile, which takes minutes.
_OUTPUTS, _WARPS, _STAGES, _WAVES = (32, 64, 128), (4, 8), (3, 4), (1, 2)
# What an interpreter tries: enough to see that the command works.
_TOY = ((32, 64), (1,), (1,), (1,))


def candidates(first: "Tiles", place: Place) -> Iterator[tuple["Tiles", int]]:
    """Tiles and numbers of programs to try around a plan's own tiles."""
    outputs, warps, stages, waves = (_OUTPUTS, _WARPS, _STAGES, _WAVES) if place.is_gpu else _TOY
    processors = torch.cuda.get_device_properties(place.device).multi_processor_count if place.is_gpu else 1
    for block_n, warp, stage, wave in product(outputs, warps, stages, waves):
        yield replace(first, block_n=block_n, warps=warp, stages=stage), wave * processors


def time_tiles(bench: Bench, shape: str, schemes: Sequence[str], widths: Sequence[int]) -> None:
    """Rows: for each scheme, layer and width the candidates by their time, quickest first.

    Widths up to `tile_sizes.NARROW` try the narrow tiles, wider ones the wide tiles. What a GPU refuses (too much
    shared memory) is left out with that reason.
    """
    from runtime.kernels.triton.linear import triton_linear
    from runtime.kernels.triton.tile_sizes import NARROW, plan
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
                narrow = width <= NARROW
                x = torch.randn(width, layer.inputs, device=place.device)
                tasks: dict[tuple[Tiles, int], Callable[[], float]] = {}
                for tiles, programs in candidates(own.narrow if narrow else own.wide, place):
                    part = {"narrow": tiles} if narrow else {"wide": tiles}
                    tried = [triton_linear(w, replace(own, programs=programs, **part)) for w in weights]
                    try:
                        rounded = tried[0].round(x)
                        run = place.repeated(partial(each, [one.product for one in tried], rounded))
                    except Exception as error:  # the compiler's own classes, which share none but this
                        bench.leave_out(error, **_about(scheme, layer.name, width, tiles, programs))
                        continue
                    tasks[tiles, programs] = place.task(run, calls=len(weights))
                timed = {key: median(s.seconds for s in taken) for key, taken in bench.samples(tasks).items()}
                for (tiles, programs), took in sorted(timed.items(), key=lambda item: item[1]):
                    speed = {"ms_median": took * 1e3, "gb_per_second": first.nbytes / took / 1e9}
                    bench.rows.append(_about(scheme, layer.name, width, tiles, programs) | speed)
                place.release()


def _about(scheme: str, layer: str, width: int, tiles: "Tiles", programs: int) -> dict[str, Any]:
    return {
        "scheme": scheme, "layer": layer, "width": width, "programs": programs,
        "block_n": tiles.block_n, "warps": tiles.warps, "stages": tiles.stages,
    }  # fmt: skip
