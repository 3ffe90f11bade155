"""What a block drafter of published acceptance gains here, and how near the chosen γ comes to the best fixed one.

    python examples/replayed_acceptance.py --shape qwen3-4b
    python examples/replayed_acceptance.py --shape qwen3-4b --layers 6 --texts 16 --new-tokens 192

A target of random weights and a block drafter of random weights, which runs and is paid for; its tokens are replaced by
the target's own with the acceptance that was asked for. DSpark's paper (2607.05147, table 1: Qwen3-4B, 7 tokens) gives
tokens a round, 5.12 on code and 3.49 in chat on average, and not acceptance by position: the same at each position is
taken, that which makes these means. All ways of decoding take their turn at each text, in one cache, and each place of
a text is drafted right or wrong alike in all of them.

γ is chosen by a controller that stays from round to round ("chosen"), and by new ones, for which each round's texts are
the first: of which nothing is known, that begin with what rows cost, as `serve` does, and that know the drafter as a
run's report does. What these know was measured in the round before those that count.

How near a way comes to the best fixed γ is said three times: by the clock; at what rounds of as many drafted tokens
usually take, the middle one of all ways' (a machine that others use is slow for whom it happens to be); and by tokens a
round alone. Prompts do not count.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.cli import without_traceback

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runtime.contract import Cache, Decoder
    from runtime.engine.metrics import Metrics
    from runtime.speculative.draft import Drafter
    from runtime.speculative.draft_length import Controller
    from runtime.speculative.measured import Prior
    from runtime.speculative.wanted import RoundEvent

TEXTS = {"code": 5.12, "chat": 3.49}
CHOSEN, NEW, COSTS, REPORT = "chosen", "first texts", "first, costs known", "first, report known"
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass
class Way:
    """A way of decoding: γ or who chooses it, and of each round of all texts what its own rounds were."""

    drafter: "Drafter"
    draft_length: "int | Controller"
    rounds: "list[list[RoundEvent]]" = field(default_factory=list)

    def speeds(self) -> list[float]:
        """Tokens per millisecond by the clock, round by round."""
        return [sum(len(one.gained) for one in each) / sum(one.milliseconds for one in each) for each in self.rounds]

    @property
    def tokens(self) -> float:
        """Tokens a round."""
        gained = [len(one.gained) for each in self.rounds for one in each]
        return sum(gained) / len(gained)

    def usual_speed(self, usual: "Mapping[tuple[bool, int], float]") -> float:
        """Tokens per millisecond, if each round takes what rounds like it usually take."""
        every = [one for each in self.rounds for one in each]
        return sum(len(one.gained) for one in every) / sum(usual[kind_of(one)] for one in every)


def kind_of(one: "RoundEvent") -> tuple[bool, int]:
    """What its time depends on: whether the drafter was asked, and how many tokens it drafted."""
    return bool(one.drafter), len(one.tokens)


def usual_times(ways: "Sequence[Way]") -> "dict[tuple[bool, int], float]":
    """Milliseconds of the middle one of all rounds of a kind."""
    found: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for way in ways:
        for each in way.rounds:
            for one in each:
                found[kind_of(one)].append(one.milliseconds)
    return {kind: median(times) for kind, times in found.items()}


def decode(decoder: "Decoder", cache: "Cache", way: Way, number: int, prompt: "Sequence[int]", most: int) -> "Metrics":
    """The text of this number, of `most` tokens; adds its rounds to the way's last, and returns what was counted."""
    from runtime.engine.engine import Engine
    from runtime.engine.metrics import Metrics
    from runtime.sampling.params import Sampling
    from runtime.speculative.draft import Request
    from runtime.speculative.wanted import Wanted

    engine = Engine(decoder, way.drafter, way.draft_length, "coupled", cache)
    request = Request(number, list(prompt), len(prompt), Sampling(), most, wanted=Wanted(rounds=True))
    counts = Metrics()
    engine.add(request, counts)
    while engine.busy:
        engine.step()
    # The first one read the prompt.
    way.rounds[-1] += request.found.rounds[1:]
    return counts


def rate_of(tokens: float, length: int) -> float:
    """Acceptance p of each of `length` tokens, where a round gains 1 + p + p² + … tokens: bisection."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(length + 1)) < tokens else (low, middle)
    return low


def all_texts(
    decoder: "Decoder", cache: "Cache", ways: "dict[str, Way]", prompts: "Sequence[Sequence[int]]", new_tokens: int
) -> "dict[str, Metrics]":
    """A round: each text by all ways in turns, so that a minute in which the machine is slow is slow for all."""
    from runtime.engine.metrics import Metrics, total

    counts: dict[str, list[Metrics]] = {name: [] for name in ways}
    for way in ways.values():
        way.rounds.append([])
    for number, prompt in enumerate(prompts):
        for name, way in ways.items() if number % 2 else reversed(ways.items()):
            counts[name].append(decode(decoder, cache, way, number, prompt, new_tokens))
    return {name: total(each) for name, each in counts.items()}


def report_of(fixed: "Metrics", plain: "Metrics", widths: "Mapping[int, float]") -> "Prior":
    """What a run's report would say of the drafter, from texts of one γ and without drafts."""
    from runtime.speculative.measured import Prior

    step = plain.step_seconds
    assert fixed.drafted and step is not None
    length = max(1, round(fixed.drafted / fixed.rounds))
    drafting = fixed.draft_seconds / fixed.rounds / step
    return Prior(tuple(fixed.accepted_by_position), length, drafting, widths)


def measured(
    folder: Path, texts: int, new_tokens: int, rounds: int, fixed: list[int], threads: int | None
) -> dict[str, dict[str, Way]]:
    """By kind of text and name (plain, chosen, γ) the ways of decoding, and their rounds."""
    from runtime.bench.jobs import plain_texts, random_items
    from runtime.bench.replay import LENGTH, ReplayedDrafter, random_network
    from runtime.bench.speculate import Job
    from runtime.model.load import load
    from runtime.sampling.params import Sampling
    from runtime.speculative.costs import first_costs
    from runtime.speculative.draft import NoDrafter
    from runtime.speculative.draft_length import Controller
    from runtime.speculative.drafters.block import BlockDrafter

    model = load(folder, threads=threads)
    items = random_items(model.decoder.vocab_size, texts, 0)
    prompts = [item.tokens for item in items]
    job = Job(model.decoder, NoDrafter(), items, new_tokens, 1, Sampling(), "coupled", None)
    known, block, cache = plain_texts(job), BlockDrafter(random_network(model)), model.decoder.new_cache()
    found: dict[str, dict[str, Way]] = {}
    for kind, tokens in TEXTS.items():
        drafter = ReplayedDrafter(block, known, (rate_of(tokens, LENGTH),), model.decoder.vocab_size)
        ways = {"plain": Way(NoDrafter(), 0)}
        ways |= {f"γ = {length}": Way(drafter, length) for length in fixed}
        ways |= {name: Way(drafter, Controller()) for name in (CHOSEN, NEW, COSTS, REPORT)}
        counts = all_texts(model.decoder, cache, ways, prompts, new_tokens)
        widths = first_costs(model, items[0].tokens)
        prior = report_of(counts[f"γ = {fixed[-1]}"], counts["plain"], widths)
        for way in ways.values():
            way.rounds.clear()
        for _ in range(rounds):
            ways[NEW].draft_length = Controller()
            ways[COSTS].draft_length = Controller(widths=widths)
            ways[REPORT].draft_length = Controller(prior=prior)
            all_texts(model.decoder, cache, ways, prompts, new_tokens)
        found[kind] = ways
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
    from rich.table import Table

    from runtime.bench.output import console
    from runtime.bench.random_models import write_shape

    with without_traceback(), TemporaryDirectory(prefix="specpress-replay-") as folder:
        path = write_shape(shape, scheme, Path(folder) / shape, layers=layers)
        lengths = [int(length) for length in fixed.split(",")]
        found = measured(path, texts, new_tokens, rounds, lengths, threads)
        table = Table("text", "way", "over plain", "tokens a round", "over the best fixed", "usual times", "by tokens")
        for kind, ways in found.items():
            usual, plain = usual_times(list(ways.values())), ways.pop("plain").speeds()
            best = max(
                (way for name, way in ways.items() if name.startswith("γ")), key=lambda one: one.usual_speed(usual)
            )
            for name, way in ways.items():
                near = over(way.speeds(), best.speeds()), way.usual_speed(usual) / best.usual_speed(usual)
                ratios = [f"{ratio:.3f}" for ratio in (*near, way.tokens / best.tokens)]
                table.add_row(kind, name, f"{over(way.speeds(), plain):.2f} ×", f"{way.tokens:.2f}", *ratios)
        console().print(table)


if __name__ == "__main__":
    app()
