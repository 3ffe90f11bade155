"""Our logits against tests/oracle/, which reads, dequantises and computes by itself, within the bound that it derives.

Models of one block: the bound is for the worst that roundings can do together, and grows a thousandfold a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from runtime import load, native
from runtime.cache.contiguous import ContiguousCache
from runtime.contract import CacheKind, Rows
from tests.oracle.balls import Choice, Choices, norm
from tests.oracle.files import Array, Weight
from tests.oracle.model import Oracle
from tests.random_checkpoints import draw

PATHS = ("reference", *(name for name in native.PATHS if native.usable(name)[0]))
KINDS: tuple[CacheKind, ...] = ("float32", "float32", "int8", "int4", "float16")
MODELS, CHUNK, LENGTH = 1000, 100, 10
# One of every library's layouts.
QUICK = (6, 9, 18, 27, 36, 45, 48, 60)
# The native kernels keep the codes of a layer's inputs to themselves, so that those are searched. Of codes near a half
# so many are tried as the other one, the nearest first; the best few of these with one more each.
_NEAREST, _BEAM, _DEEP = 60, 3, 4


@dataclass(frozen=True)
class Found:
    """What our decoder made of a text: logits (T, V) float64, and what its cache holds, by the oracle's sites."""

    logits: Array
    kind: CacheKind
    held: Mapping[str, Array]


def ratios(found: Found, oracle: Oracle, tokens: Array, choices: Choices) -> tuple[Array, Array]:
    """Errors over their bounds, of each row's logits (T, V) and of what the cache holds of it (T, n)."""
    logits, far = oracle.logits(tokens, found.kind, choices)
    assert np.isfinite(logits).all() and not np.isnan(far).any()
    return np.abs(found.logits - logits) / far, np.concatenate(choices.off, axis=1)


def follow(oracle: Oracle, tokens: Array, found: Found) -> tuple[float, int]:
    """(largest error over bound, codes that were the other one). Raises AssertionError where no codes explain a row."""
    other: frozenset[Choice] = frozenset()
    while True:
        worst = np.concatenate(ratios(found, oracle, tokens, Choices(other, found.held)), axis=1).max(axis=1)
        if (worst <= 1).all():
            return float(worst.max()), len(other)
        # Rows see each other through the cache alone, whose content is given: each has its own codes to explain it.
        other = _explain(int(np.argmax(worst > 1)), oracle, tokens, found, other)


def _explain(row: int, oracle: Oracle, tokens: Array, found: Found, other: frozenset[Choice]) -> frozenset[Choice]:
    """The codes `other` and a few more of a row, with which it is within its bound.

    Errors of several codes add up, in directions of their own: each right one makes the sum of squares less. Of the
    logits, that is: in a cache of codes most are hidden; but what only keys are made of may show nowhere else.
    """
    beam, nearest = [other], np.inf
    for _ in range(_DEEP):
        tried: dict[frozenset[Choice], list[Array]] = {}
        for chosen in beam:
            choices = Choices(chosen, found.held)
            oracle.logits(tokens, found.kind, choices)
            near = sorted((c for c in choices.near if c[1] == row and c not in chosen), key=choices.near.__getitem__)
            for more in {chosen | {code} for code in near[:_NEAREST]} - tried.keys():
                tried[more] = [part[row] for part in ratios(found, oracle, tokens, Choices(more, found.held))]
        worst = {chosen: float(np.concatenate(parts).max()) for chosen, parts in tried.items()}
        best = min(worst, key=worst.__getitem__, default=None)
        if best is None:
            break
        if (nearest := worst[best]) <= 1:
            return best
        sums = ({chosen: float(norm(parts[i])) for chosen, parts in tried.items()} for i in range(2))
        beam = [chosen for sizes in sums for chosen in sorted(sizes, key=sizes.__getitem__)[:_BEAM]]
    raise AssertionError(f"row {row} is {nearest:.3g} bounds away, whichever codes near a half are the other one")


def compare(folder: Path, seed: int, paths: Sequence[str] = PATHS) -> list[tuple[float, int]]:
    """`follow` of a model on some paths."""
    rng = np.random.default_rng(seed)
    model = draw(seed, deepest=1)
    oracle, kind = Oracle(model.write(folder)), KINDS[rng.integers(len(KINDS))]
    tokens = rng.integers(1, model.config["vocab_size"], LENGTH)
    found = []
    # The native kernels have no caches of half precision.
    for kernels in paths if kind != "float16" else paths[:1]:
        try:
            found.append(follow(oracle, tokens, ours(folder, kernels, kind, tokens)))
        except AssertionError as error:
            raise AssertionError(f"{model.label}, {kernels}, {kind}: {error}") from error
    return found


def ours(folder: Path, kernels: str, kind: CacheKind, tokens: Array) -> Found:
    """A text through our decoder, and its cache read back: codes are what comes back over its scale."""
    decoder = load(folder, kernels=kernels).decoder
    cache = decoder.new_cache(kind)
    assert isinstance(cache, ContiguousCache)
    count = len(tokens)
    handle = cache.open(count)
    logits = decoder.forward(torch.from_numpy(tokens), Rows.chains([(handle, 0, count)]), cache).logits.double().numpy()
    held = {}
    store = cache.store(handle)
    for name, part, scale in zip(
        ("keys", "values"), cache.read(0, handle, count), (store.key_scale, store.value_scale), strict=True
    ):
        numbers = part[0, :, :count].transpose(0, 1).double().numpy()
        if kind in ("int8", "int4"):
            numbers = np.rint(numbers / scale[0, 0, :, :count].t().unsqueeze(-1).double().clamp(min=1e-30).numpy())
        held[f"model.layers.0.self_attn {name}"] = numbers
    return Found(logits, kind, held)


def test_a_few_models(tmp_path: Path) -> None:
    for seed in QUICK:
        # The reference and the machine's best: the others are the thousand's.
        assert all(0 < ratio < 1 for ratio, _ in compare(tmp_path / str(seed), seed, PATHS[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, MODELS, CHUNK))
def test_a_thousand_models(tmp_path: Path, first: int) -> None:
    found, failed = [], []
    for seed in range(first, first + CHUNK):
        try:
            found += compare(tmp_path / str(seed), seed)
        except AssertionError as error:
            failed.append(str(error))
    worst, followed = np.array([ratio for ratio, _ in found]), sum(n for _, n in found)
    print(
        f"models {first} to {first + CHUNK - 1}: {len(found)} comparisons, error over bound at most {worst.max():.3g},"
        f" median {np.median(worst):.3g}, least {worst.min():.3g}; {followed} codes followed; {len(failed)} failed"
    )
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("damage", ["code", "scale", "offset"])
def test_one_wrong_number_would_be_noticed(tmp_path: Path, damage: str) -> None:
    """The positive: an oracle that reads one code, scale or zero point otherwise is out of the bound."""
    seed = 48
    model = draw(seed, deepest=1)
    oracle = Oracle(model.write(tmp_path / "m"))
    tokens = np.random.default_rng(seed).integers(1, model.config["vocab_size"], LENGTH)
    found = ours(tmp_path / "m", "reference", "float32", tokens)
    assert follow(oracle, tokens, found)[0] < 1
    name = next(name for name in model.tensors if name.endswith("down_proj.qweight")).removesuffix(".qweight")
    weight = oracle.weight(name)
    oracle.weights[name] = damaged(weight, damage)
    with pytest.raises(AssertionError, match="bounds away"):
        follow(oracle, tokens, found)


@pytest.mark.parametrize("kind", ["int4", "int8", "float16"])
def test_one_wrong_number_of_a_cache_would_be_noticed(tmp_path: Path, kind: CacheKind) -> None:
    model = draw(48, deepest=1)
    oracle = Oracle(model.write(tmp_path / "m"))
    tokens = np.random.default_rng(48).integers(1, model.config["vocab_size"], LENGTH)
    found = ours(tmp_path / "m", "reference", kind, tokens)
    assert follow(oracle, tokens, found)[0] < 1
    for numbers in found.held.values():
        right = numbers[2, 0, 1]
        numbers[2, 0, 1] = np.nextafter(np.float16(right), np.float16(0)) if kind == "float16" else right - 1
        with pytest.raises(AssertionError, match=r"row 2 is .* bounds away"):
            follow(oracle, tokens, found)
        numbers[2, 0, 1] = right


def damaged(weight: Weight, damage: str) -> Weight:
    """The weight with one number of an output changed: a code by 1, a scale by a hundredth, a zero point by 1."""
    assert weight.scale is not None and weight.offset is not None
    codes, scale, offset = weight.codes.copy(), weight.scale.copy(), weight.offset.copy()
    match damage:
        case "code":
            codes[3, 5] += 1
        case "scale":
            scale[3, 0] *= 1.01
        case _:
            offset[3, 0] += scale[3, 0]
    return replace(weight, codes=codes, scale=scale, offset=offset)
