"""Static ranges by every observer, from the recipe to the model's file."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress import Recipe, compress
from compress.model.source import default_pair
from runtime.checkpoints.open import open_checkpoint

OBSERVERS = ("search", "minmax", "moving_average", "percentile", "mse", "entropy")
Ranges = dict[str, float]


@pytest.fixture
def ranges(tmp_path: Path) -> Callable[..., tuple[Ranges, float]]:
    """Input scale by layer, and the perplexity, of a model in static eight bits."""
    text = tmp_path / "code.txt"
    text.write_text("\n".join(f"def double_{i}(value):\n    return value * {i % 17} + {i}" for i in range(300)))

    def made(model: Path, observer: str, *before: dict[str, Any]) -> tuple[Ranges, float]:
        stages = [*before, {"quantize": {"scheme": "int8-static", "observer": observer}}]
        file = tmp_path / f"{observer}.yaml"
        file.write_text(json.dumps({"stages": stages}))
        small = {"calib": str(text), "samples": 3, "seq_len": 64, "eval_tokens": 128, "speed": False}
        artifact = compress(model, Recipe.load(file), tmp_path / f"{observer}-{len(before)}", **small)
        checkpoint = open_checkpoint(artifact.model)
        names = [name for name in checkpoint.names() if name.endswith(".input_scale")]
        found = {name: float(checkpoint.tensor(name)) for name in names}
        return found, artifact.report["quality"]["perplexity"]["compressed"]

    return made


def is_a_shrunk(searched: Ranges, whole: Ranges) -> bool:
    """Whether each range that was searched is one that the search tries: fiftieths of the whole, in bfloat16 both.

    Of the first block: what goes into the others depends on how those before them were rounded.
    """
    parts = [50 * searched[name] / whole[name] for name in whole if ".layers.0." in name]
    return len(parts) == 7 and all(part <= 50.25 and abs(part - round(part)) < 0.25 for part in parts)


@pytest.mark.slow
def test_each_observer_has_ranges_of_its_own(ranges: Callable[..., tuple[Ranges, float]]) -> None:
    found = {observer: ranges(default_pair()[0], observer) for observer in OBSERVERS}
    scales = {observer: one for observer, (one, _) in found.items()}
    assert all(math.isfinite(perplexity) and perplexity < 100 for _, perplexity in found.values())
    assert len({tuple(one.values()) for one in scales.values()}) == len(OBSERVERS)
    widest = scales["minmax"]
    assert widest and is_a_shrunk(scales["search"], widest)
    for one in scales.values():
        assert one.keys() == widest.keys()
        assert all(0 < one[name] <= widest[name] for name in widest if ".layers.0." in name)


def test_ranges_are_of_the_smoothed_inputs(
    tiny: Callable[..., Path], ranges: Callable[..., tuple[Ranges, float]]
) -> None:
    """The search scales its statistics channel by channel; an observer reads the smoothed block's inputs again."""
    searched, widest = (ranges(tiny("llama"), name, {"smooth": {"alpha": 0.5}})[0] for name in ("search", "minmax"))
    assert is_a_shrunk(searched, widest)
    assert widest != ranges(tiny("llama"), "minmax")[0]
