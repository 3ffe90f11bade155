"""How far the planner's predictions are from what is measured: forwards and speculative decoding.

    .venv/bin/python examples/planner_accuracy.py --shape tinyllama-1.1b --draft-shape tinyllama-tenth --count 12

For random assignments of bits to the layers of a shape (random weights: they take the time of real ones) it predicts
milliseconds of a forward at widths 1, 4 and 8, and tokens a second with an oracle that is right with a given
probability, then builds each model and measures both, in turns with the prediction's own basis. Prints each assignment
and the errors' median and worst.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from compress.best import forwards
from compress.best.costs import Costs
from compress.best.space import Assignment, Unit, find_units
from compress.best.stand_in import stand_in
from compress.model.structure import read_structure
from compress.progress import silent
from runtime import Speculator, load
from runtime.bench.jobs import random_items
from runtime.bench.oracle import OracleDrafter
from runtime.bench.random_models import write_shape
from runtime.bench.random_tokenizer import write_tokenizer
from runtime.bench.shapes import SHAPES
from runtime.bench.speculate import Item
from runtime.checkpoints.open import open_checkpoint
from runtime.engine.metrics import Metrics
from runtime.model.load import Model
from runtime.speculative.costs import width_cost

WIDTHS = (1, 4, 8)
NEW_TOKENS, PROMPTS = 48, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--draft-shape", default="tinyllama-tenth")
    parser.add_argument("--count", type=int, default=12, help="assignments")
    parser.add_argument("--alpha", type=float, default=0.8, help="probability that the oracle's token is right")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        target = write_shape(asked.shape, "bf16", Path(folder) / "target", seed=1)
        drafting = write_shape(asked.draft_shape, "int8", Path(folder) / "draft", seed=2)
        write_tokenizer(target, SHAPES[asked.shape].architecture.vocab)
        study(load(target, threads=asked.threads), load(drafting, threads=asked.threads), asked)


def study(original: Model, draft: Model, asked: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(original.path)
    units = find_units({name: checkpoint.shape(name) for name in checkpoint.names()}, read_structure(original.path))
    items = random_items(original.decoder.vocab_size, PROMPTS, asked.seed)
    text = items[0].tokens * 4
    began = perf_counter()
    known = forwards.time_model(original, checkpoint, units, text[:128], silent)
    short, short_rounds = forwards.shortest(original, checkpoint, units, known)
    more = oracle_beside(short, short_rounds, draft, items, asked)
    basis_seconds = perf_counter() - began
    generator = random.Random(asked.seed)
    chosen = [drawn(units, generator) for _ in range(asked.count)]
    rows = []
    for assignment in chosen:
        made = partial(stand_in, original, checkpoint, units, assignment)
        model = made()
        assert model is not None
        # The original beside it says how fast the machine is now against when the basis was taken.
        own, (took,) = forwards.beside(original, [partial(_itself, model)], text[:128])
        assert took is not None
        pace_now = median(own[width] / known_own(known, units)[width] for width in WIDTHS)
        predicted = known.forward(units, assignment)
        rows.append(
            (predicted, took, pace_now, speculative(model, draft, items, known.round(units, assignment), more, asked))
        )
        del model
    show(rows, basis_seconds, asked)


def _itself(model: Model) -> Model:
    return model


def known_own(known: Costs, units: tuple[Unit, ...]) -> dict[int, float]:
    return known.forward(units, {unit.name: unit.options[0] for unit in units})


def drawn(units: tuple[Unit, ...], generator: random.Random) -> Assignment:
    """An option for each unit, few units as they are: all of them would be one long forward of plain weights."""
    return {
        unit.name: generator.choice(unit.options if generator.random() < 0.15 else unit.options[1:]) for unit in units
    }


def oracle_runs(model: Model, draft: Model, items: Sequence[Item], asked: argparse.Namespace) -> list[Metrics]:
    """What decoding with the oracle counted."""
    plain = Speculator(model)
    texts = {
        tuple(item.tokens): plain.generate([item.tokens], max_new_tokens=NEW_TOKENS, stop=())[0].tokens
        for item in items
    }
    oracle = OracleDrafter(draft, texts, asked.alpha, asked.seed, model.decoder.vocab_size)
    speculator = Speculator(model, oracle, asked.draft_length)
    return [
        speculator.generate([item.tokens], max_new_tokens=NEW_TOKENS, stop=())[0].metrics for item in (*items, *items)
    ]


def oracle_beside(
    short: Model, rounds: dict[int, float], draft: Model, items: Sequence[Item], asked: argparse.Namespace
) -> float:
    """Milliseconds of a round that the oracle costs beside drafting, as acceptance.beside has it."""
    over, more = {width: spent / rounds[1] for width, spent in rounds.items()}, []
    for one in oracle_runs(short, draft, items, asked):
        spent = 1e3 * (one.seconds - one.prompt_seconds - one.draft_seconds) / one.rounds
        more.append(spent - rounds[1] * width_cost(over, 1 + one.drafted / one.rounds))
    return max(0.0, median(more))


def speculative(
    model: Model, draft: Model, items: Sequence[Item], rounds: dict[int, float], more: float, asked: argparse.Namespace
) -> tuple[float, float]:
    """(predicted, measured) tokens a second with the oracle at γ."""
    found = oracle_runs(model, draft, items, asked)
    drafted, count = sum(one.drafted for one in found), sum(one.rounds for one in found)
    late = drafted - sum(one.first_drafted for one in found)
    milliseconds = 1e3 * sum(one.draft_seconds - one.first_seconds for one in found) / max(1, late)
    over = {width: spent / rounds[1] for width, spent in rounds.items()}
    spent = milliseconds * drafted / count + more + rounds[1] * width_cost(over, 1 + drafted / count)
    rates = [one.decode_tokens_per_second for one in found if one.decode_tokens_per_second]
    return 1e3 * sum(one.gained for one in found) / count / spent, median(rates)


def show(rows: Sequence[Any], basis_seconds: float, asked: argparse.Namespace) -> None:
    table = Table(
        title=f"{asked.shape}: predicted / measured, corrected for the machine's pace; {basis_seconds:.0f} s of basis"
    )
    for name in ("assignment", *(f"width {width}" for width in WIDTHS), "pace", "oracle tokens/s"):
        table.add_column(name, justify="right")
    errors, oracle = [], []
    for number, (predicted, took, now, (said, was)) in enumerate(rows, 1):
        ratios = [
            now * width_cost({w: p / predicted[1] for w, p in predicted.items()}, width) * predicted[1] / took[width]
            for width in WIDTHS
        ]
        errors += [abs(ratio - 1) for ratio in ratios]
        oracle.append(abs(said / now / was - 1))
        table.add_row(str(number), *(f"{ratio:.3f}" for ratio in ratios), f"{now:.2f}", f"{said / now:.1f} / {was:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"forwards: median error {100 * median(errors):.1f} %, worst {100 * max(errors):.1f} %; "
        f"oracle: median {100 * median(oracle):.1f} %, worst {100 * max(oracle):.1f} %"
    )


if __name__ == "__main__":
    main()
