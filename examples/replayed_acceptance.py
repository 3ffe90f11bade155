"""What a block drafter of published acceptance gains here, and how near the chosen γ comes to the best fixed one.

    python examples/replayed_acceptance.py --shape qwen3-4b
    python examples/replayed_acceptance.py --shape tinyllama-tenth --texts 2 --new-tokens 64

A target of random weights and a block drafter of random weights, which runs and is paid for; its tokens are replaced by
the target's own with the acceptance that was asked for. DSpark's paper (2607.05147, table 1: Qwen3-4B, 7 tokens) gives
tokens a round, 5.12 on code and 3.49 in chat on average, and not acceptance by position: the same at each position is
taken, that which makes these means. All ways of decoding take their turn in each round, in one cache.

γ is chosen by a controller that stays from round to round ("chosen"), and by new ones, for which each round's texts are
the first: of which nothing is known, that begin with what rows cost, as `serve` does, and that know the drafter as a
run's report does. What these know was measured in the round before those that count.
"""

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runtime.bench.speculate import Way
    from runtime.speculative.measured import Prior

TEXTS = {"code": 5.12, "chat": 3.49}
CHOSEN, NEW, COSTS, REPORT = "chosen", "first texts", "first, costs known", "first, report known"
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def rate_of(tokens: float, length: int) -> float:
    """Acceptance p of each of `length` tokens, where a round gains 1 + p + p² + … tokens: bisection."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tokens else (low, middle)
    return low


def report_of(fixed: "Way", plain: "Way", widths: "Mapping[int, float]") -> "Prior":
    """What a run's report would say of the drafter, from passes of one γ and without drafts."""
    from runtime.speculative.measured import Prior

    counts, step = fixed.counts, plain.counts.step_seconds
    assert counts.drafted and step is not None
    length = max(1, round(counts.drafted / counts.rounds))
    drafting = counts.draft_seconds / counts.rounds / step
    return Prior(tuple(counts.accepted_by_position), length, drafting, widths)


def measured(
    folder: Path, texts: int, new_tokens: int, rounds: int, fixed: list[int], threads: int | None
) -> dict[str, dict[str, tuple[list[float], float]]]:
    """By kind of text and way of decoding (plain, chosen, γ): tokens per second of each round, and tokens a round."""
    from dataclasses import replace

    from runtime.bench.jobs import plain_texts, random_items
    from runtime.bench.replay import LENGTH, ReplayedDrafter, random_network
    from runtime.bench.speculate import Job, Way, run_once
    from runtime.model.load import load
    from runtime.sampling.params import Sampling
    from runtime.speculative.costs import first_costs
    from runtime.speculative.draft import NoDrafter
    from runtime.speculative.draft_length import Controller
    from runtime.speculative.drafters.block import BlockDrafter

    model = load(folder, threads=threads)
    items = random_items(model.decoder.vocab_size, texts, 0)
    job = Job(model.decoder, NoDrafter(), items, new_tokens, 1, Sampling(), "coupled", None)
    known, block, cache = plain_texts(job), BlockDrafter(random_network(model)), model.decoder.new_cache()
    found: dict[str, dict[str, tuple[list[float], float]]] = {}
    for kind, tokens in TEXTS.items():
        drafter = ReplayedDrafter(block, known, (rate_of(tokens, LENGTH),), model.decoder.vocab_size)
        ways = {"plain": Way(NoDrafter(), 0, cache)}
        ways |= {f"γ = {length}": Way(drafter, length, cache) for length in fixed}
        ways |= {name: Way(drafter, Controller(), cache) for name in (CHOSEN, NEW, COSTS, REPORT)}
        for way in ways.values():
            way.passes.append(run_once(replace(job, drafter=way.drafter), way))
        widths = first_costs(model, items[0].tokens)
        prior = report_of(ways[f"γ = {fixed[-1]}"], ways["plain"], widths)
        for way in ways.values():
            way.passes.clear()
        for number in range(rounds):
            ways[NEW].draft_length = Controller()
            ways[COSTS].draft_length = Controller(widths=widths)
            ways[REPORT].draft_length = Controller(prior=prior)
            for way in ways.values() if number % 2 else reversed(ways.values()):
                way.passes.append(run_once(replace(job, drafter=way.drafter), way))
        found[kind] = {name: (way.tokens_per_second, way.counts.tokens_per_round or 1.0) for name, way in ways.items()}
    return found


def over(speeds: list[float], others: list[float]) -> float:
    """How many times as fast, in the middle one of the rounds."""
    return median(a / b for a, b in zip(speeds, others, strict=True))


@app.command()
def main(
    shape: Annotated[str, typer.Option(help="A published model's sizes.")] = "qwen3-4b",
    scheme: Annotated[str, typer.Option(help="How its weights are packed.")] = "int4",
    layers: Annotated[int | None, typer.Option(help="Its first layers alone.", show_default="all")] = None,
    texts: Annotated[int, typer.Option(help="Texts.", min=1)] = 2,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each.", min=16)] = 128,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one that does not.", min=1)] = 3,
    fixed: Annotated[str, typer.Option(help="γ of the fixed ways, with commas.")] = "3,5,7",
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="physical cores")] = None,
) -> None:
    """Prints how many times plain decoding's and the best fixed γ's tokens per second each way makes."""
    from rich.console import Console
    from rich.table import Table

    from runtime.bench.random_models import write_shape

    with without_traceback(), TemporaryDirectory(prefix="specpress-replay-") as folder:
        path = write_shape(shape, scheme, Path(folder) / shape, layers=layers)
        lengths = [int(length) for length in fixed.split(",")]
        found = measured(path, texts, new_tokens, rounds, lengths, threads)
        ways = [name for name in next(iter(found.values())) if name != "plain"]
        table = Table("text", "way", "over plain decoding", "tokens a round", "over the best fixed")
        for kind, measures in found.items():
            speeds = {name: speed for name, (speed, _) in measures.items()}
            gains = {name: over(speeds[name], speeds["plain"]) for name in ways}
            best = max((name for name in ways if name.startswith("γ")), key=gains.__getitem__)
            for name in ways:
                near = f"{over(speeds[name], speeds[best]):.3f}"
                table.add_row(kind, name, f"{gains[name]:.2f} ×", f"{measures[name][1]:.2f}", near)
        Console().print(table)


if __name__ == "__main__":
    app()
