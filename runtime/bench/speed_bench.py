"""SPEED-Bench's protocol (2604.09557): acceptance by category, and speed by input length and concurrency.

Two splits, as there. Qualitative: each prompt alone, what is accepted in each category. Throughput: inputs of one
length, so many requests at a time. Texts are greedy and go on to their full number of tokens; γ is fixed, so that
acceptance by position means the same everywhere. Here both are measured with and without speculation, in turns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from statistics import median
from typing import Any

from runtime.bench.speculate import Item, Job, Pass, run_once, ways
from runtime.engine.metrics import Metrics
from runtime.errors import UserError


@dataclass(frozen=True)
class Cell:
    """What one cell of the protocol is: a split's name, its requests, how many at a time."""

    split: str
    concurrency: int
    items: tuple[Item, ...]

    @property
    def input_tokens(self) -> float:
        """Tokens of a prompt, on average."""
        return sum(len(item.tokens) for item in self.items) / len(self.items)


@dataclass(frozen=True)
class Measured:
    """A cell's passes without and with speculation, in turns."""

    cell: Cell
    plain: tuple[Pass, ...]
    spoken: tuple[Pass, ...]

    @property
    def chunks(self) -> list[list[int]]:
        """Of each request: the tokens of each round; its texts are the same in every pass."""
        return [trimmed(chunk_lengths(metrics)) for metrics in self.spoken[0].metrics]

    @property
    def categories(self) -> dict[str, float]:
        """Tokens gained a round, of each category's requests on average."""
        groups: dict[str, list[float]] = {}
        for item, lengths in zip(self.cell.items, self.chunks, strict=True):
            groups.setdefault(item.group, []).append(sum(lengths) / len(lengths))
        return {name: sum(values) / len(values) for name, values in sorted(groups.items())}

    @property
    def differ(self) -> int:
        """Texts that are not those of plain decoding."""
        return sum(a != b for a, b in zip(self.plain[0].tokens, self.spoken[0].tokens, strict=True))

    def row(self) -> dict[str, Any]:
        """The cell's figures. tokens/s: of all requests together, medians of the passes; per user: of one of them."""
        ours, base = ([rate(one) for one in passes] for passes in (self.spoken, self.plain))
        lengths = list(chain.from_iterable(self.chunks))
        return {
            "split": self.cell.split,
            "concurrency": self.cell.concurrency,
            "requests": len(self.cell.items),
            "input_tokens": self.cell.input_tokens,
            "plain_tokens_per_second": median(base),
            "tokens_per_second": median(ours),
            "tokens_per_second_per_user": median(ours) / self.cell.concurrency,
            "speedup": median(a / b for a, b in zip(ours, base, strict=True)),
            "ttft_ms": median(1e3 * m.arrivals[0][0] for one in self.spoken for m in one.metrics),
            "accept_length": sum(lengths) / len(lengths) if lengths else 1.0,
            "accepted_by_position": marginal(lengths),
            "mismatches": self.differ,
        }


def rate(one: Pass) -> float:
    """New tokens per second of all requests of a pass."""
    return sum(map(len, one.tokens)) / one.seconds


def chunk_lengths(metrics: Metrics) -> list[int]:
    """How many tokens a request gained at a time; the first is the prompt's own."""
    lengths: list[int] = []
    last = -1.0
    for at in metrics.arrivals[0]:
        if at == last:
            lengths[-1] += 1
        else:
            lengths.append(1)
        last = at
    return lengths


def trimmed(lengths: Sequence[int]) -> list[int]:
    """Without the prompt's own token and the last round, cut by the text's end maybe; [1] where nothing is left."""
    inner = list(lengths[1 if lengths[:1] == [1] else 0 : -1])
    return inner or [1]


def marginal(lengths: Sequence[int]) -> list[float]:
    """For each drafted position the share of rounds in which all up to it were accepted."""
    return [sum(length > place for length in lengths) / len(lengths) for place in range(1, max(lengths, default=1))]


def cells(job: Job, lengths: Sequence[int], concurrency: Sequence[int], count: int, seed: int) -> Iterator[Cell]:
    """The protocol's cells for a job's prompts, of which `count` requests are made for each input length.

    Lengths beyond the model's positions are left out. An input that leaves no room for the new tokens is cut.

    Raises UserError where the prompts together are shorter than one input.
    """
    yield Cell("qualitative", 1, job.items)
    room = job.decoder.max_positions - job.new_tokens
    for length in fitting(job, lengths):
        for number in sorted(concurrency):
            items = long_items(job.items, min(length, room), max(count, number), seed)
            yield Cell(f"throughput_{length // 1024}k" if length % 1024 == 0 else f"throughput_{length}", number, items)


def fitting(job: Job, lengths: Sequence[int]) -> list[int]:
    """The input lengths that the model has positions for, in order."""
    return sorted(length for length in lengths if length <= job.decoder.max_positions)


def long_items(items: Sequence[Item], length: int, count: int, seed: int) -> tuple[Item, ...]:
    """Inputs of exactly `length` tokens, made of prompts one after the other; each stands in one input but once.

    The last prompt is whole: it is what the text goes on from, and its group is the input's. Random tokens are not
    used: on them drafts are accepted otherwise than on any text.

    Raises UserError where all prompts together are shorter.
    """
    whole = sum(len(item.tokens) for item in items)
    if whole < length:
        raise UserError(
            f"--prompts: all prompts together have {whole} tokens, an input of {length} takes more; give more"
        )
    found = []
    for number in range(count):
        order = list(items)
        Random(f"{seed} {number}").shuffle(order)
        tokens: list[int] = []
        for item in order:
            tokens = item.tokens + tokens
            if len(tokens) >= length:
                break
        found.append(Item(tokens[-length:], order[0].group))
    return tuple(found)


def measure(job: Job, planned: Sequence[Cell], rounds: int, say: Callable[[str], None]) -> Iterator[Measured]:
    """Each cell's passes, after one over two requests that does not count."""
    for cell in planned:
        say(f"{cell.split}, {cell.concurrency} at a time")
        here = replace(job, items=cell.items, batch=cell.concurrency)
        both = ways(here)
        for way in both:
            run_once(here, way, here.items[:2])
        passes: tuple[list[Pass], list[Pass]] = ([], [])
        for number in range(rounds):
            for one in (0, 1) if number % 2 == 0 else (1, 0):
                passes[one].append(run_once(here, both[one], in_flight=cell.concurrency))
        yield Measured(cell, tuple(passes[0]), tuple(passes[1]))
