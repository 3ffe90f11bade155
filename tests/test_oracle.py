"""Our logits against tests/oracle/, which reads, dequantises and computes by itself, within the bound that it derives.

The bound is for the worst that roundings can do together, and grows a thousandfold a block. So in models of several
blocks each begins where ours stands: the model's first blocks alone, a decoder of their own whose cache has the same
bits, say what the stream is behind the final norm, and the oracle checks that and goes on from there.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runtime import load, native
from runtime.cache.contiguous import ContiguousCache
from runtime.contract import CacheKind, Rows
from tests import random_gguf
from tests.oracle.balls import PROBE, Choice, Choices, norm
from tests.oracle.files import Array, Weight
from tests.oracle.model import Oracle
from tests.random_checkpoints import draw, linears

PATHS = ("reference", *(name for name in native.PATHS if native.usable(name)[0]))
KINDS: tuple[CacheKind, ...] = ("float32", "float32", "int8", "int4", "float16")
MODELS, CHUNK, LENGTH = 1000, 100, 10
# One of every library's layouts.
QUICK_DEEP = (15, 48, 62)
# One of every kind of blocks, and one with several codes on the half.
QUICK_GGUF = (0, 8, 16, 24, 32, 40, 48, 50, 57, 65, 438)
QUICK = (6, 9, 18, 27, 36, 45, 48, 60)
# The native kernels keep the codes of a layer's inputs to themselves, so that those are searched. Of codes near a half
# so many are tried as the other one, the nearest first; the best few of these with one more each.
_NEAREST, _BEAM, _DEEP = 60, 3, 8
# What is closer to the half than this part of the bound, float32 turns either way: inputs that are codes themselves
# often lie on it (1 of 2 largest: 63.5). One of several may make things worse, so that many sets are tried first.
_CLOSE, _SETS = 0.01, 500


@dataclass(frozen=True)
class Found:
    """What our decoder made of a text: logits (T, V) float64, and what its cache holds, by the oracle's sites."""

    logits: Array
    kind: CacheKind
    held: Mapping[str, Array]


class Outcome(NamedTuple):
    """Largest error over bound; codes or experts that were the other one; rows of mixtures whose experts the bound
    leaves no choice of; rows of mixtures."""

    ratio: float
    followed: int
    sure: int
    routed: int


def ratios(found: Found, oracle: Oracle, tokens: Array, choices: Choices) -> list[Array]:
    """Errors over their bounds (T, n) of all that is checked, in the order of the forward, the logits at the end."""
    logits, far = oracle.logits(tokens, found.kind, choices)
    assert np.isfinite(logits).all() and not np.isnan(far).any()
    error = np.abs(found.logits - logits)
    # Both are 0 where codes cancel each other.
    over = np.divide(error, far, out=np.where(error > 0, np.inf, 0.0), where=far > 0)
    # Sums of squares are taken of them.
    return [np.minimum(part, 1e30) for part in (*choices.off, over)]


def follow(oracle: Oracle, tokens: Array, found: Found) -> Outcome:
    """How far ours is from the oracle. Raises AssertionError where no codes explain a row."""
    other: frozenset[Choice] = frozenset()
    while True:
        choices = Choices(other, found.held)
        worst = np.concatenate(ratios(found, oracle, tokens, choices), axis=1).max(axis=1)
        if (worst <= 1).all():
            return Outcome(float(worst.max()), len(other), *map(sum, zip((0, 0), *choices.sure, strict=True)))
        # Rows see each other through the cache alone, whose content is given: each has its own codes to explain it.
        other = _explain(int(np.argmax(worst > 1)), oracle, tokens, found, other)


def _explain(row: int, oracle: Oracle, tokens: Array, found: Found, other: frozenset[Choice]) -> frozenset[Choice]:
    """The codes `other` and a few more of a row, with which its first check that failed holds.

    Errors of several codes add up, in directions of their own: each right one makes the sum of squares less. Of the
    logits, that is: in a cache of codes most are hidden; but what only keys are made of may show nowhere else.
    """

    def off(chosen: frozenset[Choice]) -> tuple[list[Array], dict[Choice, float]]:
        """The row's errors over their bounds, and the codes that the first one that failed depends on, nearest first.

        They come with their distances from the half over what is allowed.
        """
        choices = Choices(chosen, found.held)
        parts = [part[row] for part in ratios(found, oracle, tokens, choices)]
        windows = [*choices.windows, (choices.start, len(choices.near))]
        able = list(choices.near.items())[slice(*windows[min(first_failed(parts), len(parts) - 1)])]
        near = sorted(((far, code) for code, far in able if code[1] == row and code not in chosen))
        return parts, {code: far for far, code in near[:_NEAREST]}

    parts, near = off(other)
    before, nearest = first_failed(parts), np.inf
    more = [other | some for some in islice(_sets([code for code, far in near.items() if far < _CLOSE]), _SETS)]
    for _ in range(_DEEP):
        tried = {chosen: off(chosen) for chosen in dict.fromkeys(more)}
        if not tried:
            break
        size = {chosen: float(norm(np.concatenate(parts))) for chosen, (parts, _) in tried.items()}
        best = min(tried, key=lambda chosen: (-first_failed(tried[chosen][0]), size[chosen]))
        if first_failed(tried[best][0]) > before:
            return best
        nearest = float(tried[best][0][before].max())
        sums = (size, {chosen: float(norm(parts[before])) for chosen, (parts, _) in tried.items()})
        beam = [chosen for sizes in sums for chosen in sorted(sizes, key=sizes.__getitem__)[:_BEAM]]
        more = [chosen | {code} for chosen in beam for code in tried[chosen][1]]
    raise AssertionError(f"row {row} is {nearest:.3g} bounds away, whichever codes near a half are the other one")


def _sets(codes: Sequence[Choice]) -> Iterator[frozenset[Choice]]:
    """Subsets of codes, the smallest of each step's first. Of equal steps, larger numbers do not get smaller codes."""
    steps: dict[tuple[str, float], list[Choice]] = {}
    for code in sorted(codes):
        steps.setdefault((code[0], code[2][1]), []).append(code)
    runs = [
        sorted({frozenset(some[first:last]) for last in range(len(some) + 1) for first in range(last + 1)}, key=len)
        for some in steps.values()
    ]
    return (frozenset[Choice]().union(*chosen) for chosen in product(*runs))


def first_failed(parts: Sequence[Array]) -> int:
    """The first check of a row that is out of its bound; their number where none is."""
    return next((place for place, part in enumerate(parts) if part.max() > 1), len(parts))


def compare(folder: Path, seed: int, paths: Sequence[str] = PATHS) -> list[Outcome]:
    """`follow` of a model of one block on some paths."""
    model = draw(seed, deepest=1)
    oracle = Oracle(model.write(folder))
    return compare_model(folder, model.label, oracle, seed, paths)


def compare_deep(folder: Path, seed: int, paths: Sequence[str] = PATHS) -> list[Outcome]:
    """`follow` of a model of two or three blocks; none of a model that was drawn with one."""
    model = draw(seed)
    if model.config["num_hidden_layers"] == 1:
        return []
    return compare_model(model.write(folder), model.label, Oracle(folder), seed, paths)


def compare_gguf(folder: Path, seed: int, paths: Sequence[str] = PATHS) -> list[Outcome]:
    """`follow` of a GGUF file of one block."""
    folder.mkdir(parents=True)
    file = folder / "model.gguf"
    label = random_gguf.write(file, seed)
    return compare_model(file, label, Oracle(file), seed, paths)


def compare_model(folder: Path, label: str, oracle: Oracle, seed: int, paths: Sequence[str]) -> list[Outcome]:
    """`follow` of a model that is written; the seed draws the cache and the text."""
    rng = np.random.default_rng(seed)
    kind = KINDS[rng.integers(len(KINDS))]
    tokens = rng.integers(1, oracle.config["vocab_size"], LENGTH)
    found = []
    # The native kernels have no caches of half precision.
    for kernels in paths if kind != "float16" else paths[:1]:
        try:
            found.append(follow(oracle, tokens, ours(folder, kernels, kind, tokens)))
        except AssertionError as error:
            raise AssertionError(f"{label}, {kernels}, {kind}: {error}") from error
    return found


def ours(folder: Path, kernels: str, kind: CacheKind, tokens: Array) -> Found:
    """A text through our decoder, and its cache read back; the stream between blocks by the first blocks alone."""
    found = run(folder, kernels, kind, tokens)[0]
    config, held = folder / "config.json", dict(found.held)
    count = json.loads(config.read_text())["num_hidden_layers"] if config.exists() else 1
    for blocks in range(1, count):
        for name, probe in (("hidden", False), ("probed", True)):
            first, hidden = run(beginning(folder, blocks, probe), kernels, kind, tokens)
            for number, part in product(range(blocks), ("keys", "values")):
                site = f"model.layers.{number}.self_attn {part}"
                assert np.array_equal(first.held[site], found.held[site])
            held[f"model.layers.{blocks - 1} {name}"] = hidden
    return Found(found.logits, kind, held)


def run(folder: Path, kernels: str, kind: CacheKind, tokens: Array) -> tuple[Found, Array]:
    """Logits, the cache read back, and hidden states. A cache's codes are what comes back over its scale."""
    decoder = load(folder, kernels=kernels).decoder
    cache = decoder.new_cache(kind)
    assert isinstance(cache, ContiguousCache)
    count = len(tokens)
    handle = cache.open(count)
    out = decoder.forward(torch.from_numpy(tokens), Rows.chains([(handle, 0, count)]), cache)
    held = {}
    store = cache.store(handle)
    for layer in range(cache.format.layers):
        for name, part, scale in zip(
            ("keys", "values"), cache.read(layer, handle, count), (store.key_scale, store.value_scale), strict=True
        ):
            numbers = part[0, :, :count].transpose(0, 1).double().numpy()
            if kind in ("int8", "int4"):
                steps = scale[layer, 0, :, :count].t().unsqueeze(-1).double()
                numbers = np.rint(numbers / steps.clamp(min=1e-30).numpy())
            held[f"model.layers.{layer}.self_attn {name}"] = numbers
    return Found(out.logits.double().numpy(), kind, held), out.hidden.double().numpy()


def beginning(folder: Path, blocks: int, probe: bool) -> Path:
    """The model's first blocks as a model; with a probe one more block, which adds PROBE to each row's first number."""
    made = folder / f"first{blocks}{probe}"
    if made.exists():
        return made
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": blocks + probe}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: blocks + probe]
    if "mlp_only_layers" in config:
        config["mlp_only_layers"] = [number for number in config["mlp_only_layers"] if number < blocks]
    kept = tuple(f"model.layers.{number}." for number in range(blocks))
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in tensors.items() if not n.startswith("model.layers.") or n.startswith(kept)}
    for group in config.get("quantization_config", {}).get("config_groups", {}).values():
        group["targets"] = [n for n in group["targets"] if not n.startswith("model.layers.") or n.startswith(kept)]
    if probe:
        base, dtype = f"model.layers.{blocks}.", tensors["model.norm.weight"].dtype
        for prefix, outputs, inputs in linears(config):
            if prefix.startswith(base):
                tensors[f"{prefix}.weight"] = torch.zeros(outputs, inputs, dtype=dtype)
        for name in [name for name in tensors if name.startswith("model.layers.0.") and "norm" in name]:
            tensors[name.replace("model.layers.0.", base)] = tensors[name].clone()
        adds = torch.zeros(config["hidden_size"], dtype=dtype)
        adds[0] = PROBE
        tensors[f"{base}self_attn.o_proj.bias"] = adds
    made.mkdir()
    save_file(tensors, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_a_few_models(tmp_path: Path) -> None:
    for seed in QUICK:
        # The reference and the machine's best: the others are the thousand's.
        assert all(0 < one.ratio < 1 for one in compare(tmp_path / str(seed), seed, PATHS[:2]))


def test_a_few_models_of_several_blocks(tmp_path: Path) -> None:
    found = [one for seed in QUICK_DEEP for one in compare_deep(tmp_path / str(seed), seed, PATHS[:2])]
    assert len(found) > len(QUICK_DEEP) and all(0 < one.ratio < 1 for one in found)


@pytest.mark.parametrize("seed", QUICK_GGUF)
def test_a_few_gguf_files(tmp_path: Path, seed: int) -> None:
    pytest.importorskip("gguf")
    assert all(0 < one.ratio < 1 for one in compare_gguf(tmp_path / "g", seed, PATHS[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("way", [compare, compare_deep, compare_gguf])
@pytest.mark.parametrize("first", range(0, MODELS, CHUNK))
def test_a_thousand_models(tmp_path: Path, first: int, way: Callable[[Path, int], list[Outcome]]) -> None:
    found, failed = [], []
    for seed in range(first, first + CHUNK):
        try:
            found += way(tmp_path / str(seed), seed)
        except AssertionError as error:
            failed.append(str(error))
    worst, followed = np.array([one.ratio for one in found]), sum(one.followed for one in found)
    print(
        f"models {first} to {first + CHUNK - 1}: {len(found)} comparisons, error over bound at most {worst.max():.3g},"
        f" median {np.median(worst):.3g}, least {worst.min():.3g}; {followed} codes followed; {len(failed)} failed;"
        f" experts that leave no choice in {sum(one.sure for one in found)} of {sum(one.routed for one in found)} rows"
    )
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("damage", ["code", "scale", "offset"])
def test_one_wrong_number_would_be_noticed(tmp_path: Path, damage: str) -> None:
    """The positive: an oracle that reads one code, scale or zero point otherwise is out of the bound."""
    oracle, found, tokens = known(tmp_path / "m", 48, 1)
    assert follow(oracle, tokens, found).ratio < 1
    name = "model.layers.0.mlp.down_proj"
    weight = oracle.weight(name)
    oracle.weights[name] = damaged(weight, damage)
    with pytest.raises(AssertionError, match="bounds away"):
        follow(oracle, tokens, found)


def test_one_wrong_code_of_the_last_block_would_be_noticed(tmp_path: Path) -> None:
    oracle, found, tokens = known(tmp_path / "m", 49, 3)
    assert follow(oracle, tokens, found).ratio < 1
    name = "model.layers.1.mlp.up_proj"
    oracle.weights[name] = damaged(oracle.weight(name), "code")
    with pytest.raises(AssertionError, match="bounds away"):
        follow(oracle, tokens, found)


def test_other_experts_would_be_noticed(tmp_path: Path) -> None:
    """Here the router's rows are another expert's; all but few rows leave no choice."""
    oracle, found, tokens = known(tmp_path / "m", 14, 1)
    right = follow(oracle, tokens, found)
    assert right.ratio < 1 and 0 < right.sure <= right.routed == LENGTH
    name = "model.layers.0.block_sparse_moe.gate"
    oracle.weights[name] = replace(oracle.weight(name), codes=oracle.weight(name).codes[::-1])
    with pytest.raises(AssertionError, match="bounds away"):
        follow(oracle, tokens, found)


def test_one_wrong_code_of_a_gguf_file_would_be_noticed(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    random_gguf.write(tmp_path / "m.gguf", 1)
    oracle = Oracle(tmp_path / "m.gguf")
    tokens = np.random.default_rng(1).integers(1, oracle.config["vocab_size"], LENGTH)
    found = ours(tmp_path / "m.gguf", "reference", "float32", tokens)
    assert follow(oracle, tokens, found).ratio < 1
    name = "model.layers.0.mlp.down_proj"
    oracle.weights[name] = damaged(oracle.weight(name), "code")
    with pytest.raises(AssertionError, match="bounds away"):
        follow(oracle, tokens, found)


def known(folder: Path, seed: int, deepest: int) -> tuple[Oracle, Found, Array]:
    """The oracle of a drawn model, what the reference makes of a text, and the text."""
    model = draw(seed, deepest)
    oracle = Oracle(model.write(folder))
    tokens = np.random.default_rng(seed).integers(1, model.config["vocab_size"], LENGTH)
    return oracle, ours(folder, "reference", "float32", tokens), tokens


@pytest.mark.parametrize("kind", ["int4", "int8", "float16"])
def test_one_wrong_number_of_a_cache_would_be_noticed(tmp_path: Path, kind: CacheKind) -> None:
    model = draw(48, deepest=1)
    oracle = Oracle(model.write(tmp_path / "m"))
    tokens = np.random.default_rng(48).integers(1, model.config["vocab_size"], LENGTH)
    found = ours(tmp_path / "m", "reference", kind, tokens)
    assert follow(oracle, tokens, found).ratio < 1
    for numbers in found.held.values():
        right = numbers[2, 0, 1]
        numbers[2, 0, 1] = np.nextafter(np.float16(right), np.float16(0)) if kind == "float16" else right - 1
        with pytest.raises(AssertionError, match=r"row 2 is .* bounds away"):
            follow(oracle, tokens, found)
        numbers[2, 0, 1] = right


def damaged(weight: Weight, damage: str) -> Weight:
    """The weight with one number of an output changed: a code by 1, a scale by a hundredth, a zero point by 1."""
    assert weight.scale is not None
    codes, scale = weight.codes.copy(), weight.scale.copy()
    offset = None if weight.offset is None else weight.offset.copy()
    match damage:
        case "code":
            codes[3, 5] += 1
        case "scale":
            scale[3, 0] *= 1.01
        case _:
            assert offset is not None
            offset[3, 0] += scale[3, 0]
    return replace(weight, codes=codes, scale=scale, offset=offset)
