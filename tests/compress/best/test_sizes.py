"""Predicted bytes are the disk's, to the byte."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from compress import compress
from compress.best.sizes import read_sizes
from compress.best.space import CACHE, CACHES, OPTIONS, find_units, make_recipe
from compress.model.source import open_sources
from compress.model.structure import read_structure
from compress.report.size import weight_bytes

Tiny = Callable[..., Path]


def written(path: Path, out: Path, seed: int, shard_bytes: int | None = None) -> tuple[int, int, int]:
    """(predicted, on disk, the sum of shares) of a random assignment."""
    source, _ = open_sources(str(path), None)
    structure = read_structure(source.path)
    units = find_units(source.shapes(), structure)
    sizes = read_sizes(source, structure, units)
    drawn = random.Random(seed)
    cache = CACHES[seed % len(CACHES)]
    # One model holds what is of one library.
    library = drawn.choice(sorted({one.library for unit in units for one in unit.options if not one.keeps}))
    fitting = {unit.name: [one for one in unit.options if one.keeps or one.library == library] for unit in units}
    chosen = {name: drawn.choice(options) for name, options in fitting.items()} | {CACHE: cache}
    recipe = make_recipe(units, chosen, "", {})
    options = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    compress(path, recipe, out, eval_tokens=0, speed=False, samples=2, seq_len=32, report=lambda *_: None, **options)
    rest, shares = sizes.shares()
    upper = rest + sum(row[u.options.index(chosen[u.name])] for u, row in zip(units, shares, strict=True))
    upper += sizes.cache_share(cache)
    limit = {} if shard_bytes is None else {"limit": shard_bytes}
    return sizes.exact(chosen, **limit), weight_bytes(out / "model"), upper


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_bytes_are_the_disks(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    # Of both libraries.
    for seed in (0, 1, 4):
        predicted, disk, upper = written(tiny(kind), tmp_path / str(seed), seed)
        assert predicted == disk
        # What the solver adds up: never less, and little more.
        assert disk <= upper <= disk + 4000


def test_bytes_of_several_files(tiny: Tiny, tmp_path: Path) -> None:
    predicted, disk, _ = written(tiny("llama"), tmp_path / "run", 5, shard_bytes=60_000)
    assert len(list((tmp_path / "run/model").glob("*.safetensors"))) > 2
    assert predicted == disk


@pytest.mark.slow
def test_bytes_of_twenty_assignments_of_the_pair(tmp_path: Path) -> None:
    target = Path(__file__).parents[3] / "examples/pair/target"
    for seed in range(20):
        predicted, disk, _ = written(target, tmp_path / str(seed), seed)
        assert predicted == disk, seed


def test_options_are_of_two_libraries_of_which_a_model_has_one(tiny: Tiny) -> None:
    libraries = {one.library for one in OPTIONS if not one.keeps}
    assert libraries == {"compressed-tensors", "specpress-trellis"}
    source, _ = open_sources(str(tiny("llama")), None)
    units = find_units(source.shapes(), read_structure(source.path))
    mixed = {unit.name: unit.options[-1 if number else 1] for number, unit in enumerate(units)}
    with pytest.raises(ValueError, match="that one model can hold together, found int8-dynamic and trellis-2"):
        make_recipe(units, mixed, "", {})


def test_a_recipe_names_each_layer_once(tiny: Tiny) -> None:
    source, _ = open_sources(str(tiny("llama")), None)
    units = find_units(source.shapes(), read_structure(source.path))
    assert [unit.block for unit in units] == sorted(unit.block for unit in units) and len(units) == 8
    chosen = {unit.name: unit.options[1 + number % 2] for number, unit in enumerate(units)}
    stage = make_recipe(units, chosen, "", {}).quantize
    assert stage is not None
    for unit in units:
        for layer in unit.layers:
            found = stage.of(layer)
            assert found is not None and found.scheme == chosen[unit.name].scheme
            assert (found.group_size or 0) == chosen[unit.name].group_size
