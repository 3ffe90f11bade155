"""How far the planner's forecasts of quality are from what is measured, and what its choice gains over one for all.

    .venv/bin/python examples/planner_quality.py --count 40
    .venv/bin/python examples/planner_quality.py --count 40 --estimate

Compresses the built-in pair (or --model) by random assignments of bits, each for real, and prints the rank correlation
of predicted and measured KL, and the error once one factor is fitted. Then the least damaging choice at the bytes of
int4-gptq, and the smallest one of its KL. With --estimate layers' damages are estimated, as the planner does it where
measuring would take too long; without, they are measured.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from compress import Artifact, Recipe, compress
from compress.best import estimate, quality
from compress.best.quality import QualityModel
from compress.best.sizes import Sizes, read_sizes
from compress.best.solve import solve
from compress.best.space import Assignment, Unit, by_library, find_units, make_recipe
from compress.context import RunContext
from compress.pipeline.inputs import open_inputs
from compress.progress import silent
from compress.report.files import read_report
from compress.report.size import weight_bytes

say = Console().print


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--count", type=int, default=40, help="assignments")
    parser.add_argument("--eval-tokens", type=int, default=8192)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        study(asked, Path(folder))


def study(asked: argparse.Namespace, folder: Path) -> None:
    context = RunContext.of(
        Recipe.load("int8-dynamic"),
        out=folder / "none",
        **({"model": asked.model} if asked.model else {}),
        **settings(asked),
    )
    inputs = open_inputs(replace(context, speed=False))
    units = find_units(inputs.target.shapes(), inputs.structure)
    sizes = read_sizes(inputs.target, inputs.structure, units)
    model = AutoModelForCausalLM.from_pretrained(inputs.target.path, dtype=torch.float32).eval()
    look, began = estimate.estimate if asked.estimate else quality.measure, time.monotonic()
    damages = look(model, inputs.text.windows.calibration, units, inputs.structure.blocks_at, silent)
    say(f"damages {'estimated' if asked.estimate else 'measured'} in {time.monotonic() - began:.0f} s")
    known = QualityModel(damages, units)
    generator = random.Random(asked.seed)
    forecast, measured = [], []
    for number in range(asked.count):
        # One model holds what is of one library: they take turns.
        held = by_library(units)[number % len(by_library(units))]
        assignment = {unit.name: generator.choice(unit.options) for unit in held}
        found = kl(make_recipe(units, assignment, "random", {}), folder / str(number), asked)
        forecast.append(known.total(assignment))
        measured.append(found)
        say(f"{number + 1:3d}  forecast {forecast[-1]:.4f}  measured {found:.4f}  ratio {found / forecast[-1]:.2f}")
    factor = median(m / f for f, m in zip(forecast, measured, strict=True))
    errors = [abs(factor * f / m - 1) for f, m in zip(forecast, measured, strict=True)]
    ranks = spearman(forecast, measured)
    say(f"Spearman {ranks:.3f}; factor {factor:.2f}, then median error {100 * median(errors):.0f} %")
    against_one_for_all(known, sizes, units, factor, folder, asked)


def against_one_for_all(
    known: QualityModel, sizes: Sizes, units: tuple[Unit, ...], factor: float, folder: Path, asked: argparse.Namespace
) -> None:
    """The planner's choices at the bytes, and at the KL, of int4-gptq."""
    theirs = kl(Recipe.load("int4-gptq"), folder / "int4", asked)
    size = weight_bytes(Artifact(folder / "int4").model)
    rest, _ = sizes.shares()
    space = [Held.of(known, sizes, held) for held in by_library(units)]
    same = min((one.least_damage(size - rest) for one in space), key=known.total)
    found = kl(make_recipe(units, same, "same bytes", {}), folder / "same", asked)
    say(
        f"int4-gptq: {size} bytes, KL {theirs:.4f}; at {sizes.exact(same)} bytes KL {found:.4f}: {found / theirs:.3f} x"
    )
    aim = theirs / factor
    for _ in range(6):
        small = min((one.least_bytes(aim) for one in space), key=sizes.exact)
        found = kl(make_recipe(units, small, "same KL", {}), folder / f"small{aim:.6f}", asked)
        now = sizes.exact(small)
        say(f"aimed at a sum of {aim:.4f}: {now} bytes ({now / size:.3f} x), KL {found:.4f}")
        if found <= theirs:
            break
        aim *= 0.97 * theirs / found


@dataclass(frozen=True)
class Held:
    """Units with the options of one library, and what each of them damages and takes."""

    units: tuple[Unit, ...]
    damages: list[list[float]]
    bytes_of: list[list[float]]

    @classmethod
    def of(cls, known: QualityModel, sizes: Sizes, units: tuple[Unit, ...]) -> "Held":
        """Of what is known of all units."""
        shares = replace(sizes, units=units).shares()[1]
        damages = [list(row) for row in known.limited(units).damages]
        return cls(units, damages, [[float(one) for one in row] for row in shares])

    def least_damage(self, most: float) -> Assignment:
        """Within so many bytes."""
        return self._chosen(solve(self.damages, [self.bytes_of], [float(most)]).picks)

    def least_bytes(self, most: float) -> Assignment:
        """Within so much damage."""
        return self._chosen(solve(self.bytes_of, [self.damages], [most]).picks)

    def _chosen(self, picks: Sequence[int]) -> Assignment:
        return {unit.name: unit.options[pick] for unit, pick in zip(self.units, picks, strict=True)}


def settings(asked: argparse.Namespace) -> dict[str, Any]:
    return {"eval_tokens": asked.eval_tokens, "threads": asked.threads, "baselines": "none", "speed": False}


def kl(recipe: Recipe, out: Path, asked: argparse.Namespace) -> float:
    """Mean KL(original ‖ compressed), nats a token, of a real run."""
    artifact = compress(asked.model, recipe, out, **settings(asked))
    found = read_report(artifact.path).quality
    assert found is not None and found.kl_divergence is not None
    return float(found.kl_divergence.mean)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of ranks."""
    first, second = (np.argsort(np.argsort(values)) for values in (x, y))
    return float(np.corrcoef(first, second)[0, 1])


if __name__ == "__main__":
    main()
