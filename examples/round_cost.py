"""What a round takes beside the kernels: microseconds of one greedy request's rounds whose forwards compute nothing.

    python examples/round_cost.py
    python examples/round_cost.py --target runs/int4/model --count 4000

All of the engine and of the decoder's Python runs; only the native forward gives logits of zeros at once. On a model
whose forward takes a fifth of a millisecond these microseconds are felt. The ways take turns, and of each way's rounds
the least decile is what they take while nothing else disturbs them. Of a γ that is chosen some rounds cost more than
others: the mean, of processor time, has them all.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Annotated, Any
from unittest.mock import patch

import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from runtime.contract import Cache, Decoder
    from runtime.speculative.draft import Drafter
    from runtime.speculative.draft_length import Controller

PAIR = Path(__file__).parent / "pair"
PROMPT = 64
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Took:
    """Microseconds: of each round, and by turn the mean of processor time."""

    rounds: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)


def half_right() -> "Drafter":
    """Proposes two tokens that are right and then two that are not, and takes no time for it."""
    from runtime.speculative.draft import Draft, EachText, Request

    class HalfRight(EachText[None]):
        name = "half right"

        def propose(self, requests: Sequence[Request], budgets: Sequence[int]) -> list[Draft]:
            return [Draft.chain([0, 0, 1, 1][:budget]) for budget in budgets]

    return HalfRight()


def empty_forward(vocab_size: int) -> Callable[..., None]:
    """Stands for the library's forward: logits of zeros."""

    def forward(*given: Any) -> None:
        count, logits = given[4], given[6]
        if logits:  # without, the most probable tokens are asked for alone, and are 0 already
            ctypes.memset(logits, 0, 4 * count * vocab_size)

    return forward


def run(
    decoder: "Decoder", cache: "Cache", drafter: "Drafter", draft_length: "int | Controller", count: int, took: Took
) -> None:
    """Adds so many rounds of one request, after its prompt."""
    from runtime.engine.engine import Engine
    from runtime.engine.metrics import Metrics
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import Request

    engine = Engine(decoder, drafter, draft_length, "coupled", cache)
    engine.add(Request(0, [0] * PROMPT, PROMPT, Sampling(), 5 * count + PROMPT), Metrics())
    engine.step()
    for _ in range(count):
        began = perf_counter()
        engine.step()
        took.rounds.append(1e6 * (perf_counter() - began))
    engine.close()
    engine.add(Request(0, [0] * PROMPT, PROMPT, Sampling(), 5 * count + PROMPT), Metrics())
    engine.step()
    began = process_time()
    for _ in range(count):
        engine.step()
    took.means.append(1e6 * (process_time() - began) / count)
    engine.close()


def measured(target: str, count: int, turns: int) -> dict[str, Took]:
    """What rounds take by the way of decoding. Raises UserError for a target that other kernels run."""
    from runtime.errors import UserError
    from runtime.model.load import load
    from runtime.model.native import NativeDecoder
    from runtime.native.binding import require
    from runtime.speculative.draft import NoDrafter
    from runtime.speculative.draft_length import Controller

    decoder = load(target, threads=1).decoder
    if not isinstance(decoder, NativeDecoder):
        raise UserError(f"{decoder.kernels} run this target, and only the native kernels can be left out; name another")
    cache, chosen = decoder.new_cache(), Controller()
    ways: dict[str, tuple[Drafter, int | Controller]] = {
        "plain": (NoDrafter(), 0),
        "4 drafted, 2 accepted": (half_right(), 4),
        "the same, γ chosen": (half_right(), chosen),
    }
    took = {name: Took() for name in ways}
    with patch.object(require(), "specpress_forward", empty_forward(decoder.vocab_size)):
        for turn in range(turns):
            for name, (drafter, draft_length) in ways.items() if turn % 2 else reversed(ways.items()):
                run(decoder, cache, drafter, draft_length, count, took[name])
    return took


@app.command()
def main(
    target: Annotated[str, typer.Option(help="A model directory, a run folder, or a hub name.")] = str(PAIR / "target"),
    count: Annotated[int, typer.Option(help="Rounds of a turn, which are run twice.", min=10)] = 400,
    turns: Annotated[int, typer.Option(help="Turns of each way.", min=1)] = 10,
) -> None:
    """Prints what a round takes without its forward's arithmetic."""
    from rich.table import Table

    from runtime.bench.output import console

    with without_traceback():
        table = Table("rounds", "least decile, µs", "median, µs", "mean, µs")
        for name, took in measured(target, count, turns).items():
            least, middle, mean = quantiles(took.rounds, n=10)[0], median(took.rounds), median(took.means)
            table.add_row(name, f"{least:.1f}", f"{middle:.1f}", f"{mean:.1f}")
        console().print(table)


if __name__ == "__main__":
    app()
