"""What ways of decoding took, as rows for JSON and as tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from rounds import Decoded, Turn, Work
from ways import OURS, PRECISIONS

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = [
    ("name", "engine, drafter", "s"), ("length", "draft length", ">s"), ("tokens_per_second", "tokens/s", ".0f"),
    ("tokens_per_second_min", "lowest", ".0f"), ("tokens_per_second_max", "highest", ".0f"),
    ("over_plain", "over plain", ".2f"), ("cores", "cores", ".2f"), ("differing", "tokens ≠ plain", ">s"),
    ("agreement", "as fp32", ".0%"),
]  # fmt: skip
_RATIOS = [
    ("theirs", "theirs", "s"), ("us", "ours", "s"), ("ratio", "ratio", ".2f"), ("ratio_min", "lowest", ".2f"),
    ("ratio_max", "highest", ".2f"), ("same_drafter", "same drafter", ".2f"),
]  # fmt: skip
# The unquantised reference, whose texts show that the others run the same model.
REFERENCE = "transformers"


@dataclass(frozen=True)
class Row:
    """One way of decoding; rates are medians over rounds, the prompts' own forwards included in the time.

    draft_length      None: the engine's own schedule, or plain decoding.
    over_plain        speed over the same engine's plain decoding, the median over rounds.
    cores             processor seconds over seconds.
    tokens_compared, tokens_differing, texts_differing   against the same engine's plain text, over all rounds. A text
                      that differs at one token mostly differs at all that follow.
    agreement         mean share of a text up to where it first differs from transformers' plain float32 text.
    The last four and over_plain are None where that plain decoding was not measured.
    """

    engine: str
    drafter: str
    draft_length: int | None
    tokens_per_second: float
    tokens_per_second_min: float
    tokens_per_second_max: float
    over_plain: float | None
    cores: float
    tokens_compared: int | None
    tokens_differing: int | None
    texts_differing: int | None
    agreement: float | None


@dataclass(frozen=True)
class Ratio:
    """Our fastest way's tokens/s over a peer's with one drafter, each at its best draft length.

    ratio  median over rounds of the two rates in the same round, with the lowest and the highest: above 1, ours is the
           faster.
    same_drafter  the same for our best draft length with the peer's kind of drafter; None where we did not run it.
    """

    engine: str
    drafter: str
    draft_length: int | None
    ours: str
    ours_draft_length: int | None
    ratio: float
    ratio_min: float
    ratio_max: float
    same_drafter: float | None


def rows(found: Sequence[Decoded], work: Work) -> list[Row]:
    """One for each way, in the given order."""
    plain = {one.way.engine: one for one in found if one.way.drafter == "none"}
    return [_row(one, plain.get(one.way.engine), plain.get(REFERENCE), work) for one in found]


def _row(one: Decoded, plain: Decoded | None, reference: Decoded | None, work: Work) -> Row:
    rates = _rates(one, work)
    turns = [] if plain is None else list(zip(plain.turns, one.turns, strict=True))
    counts = None if plain is None else [differing(a.texts, b.texts) for a, b in turns]
    return Row(
        engine=one.way.engine,
        drafter=one.way.drafter,
        draft_length=one.way.draft_length,
        tokens_per_second=median(rates),
        tokens_per_second_min=min(rates),
        tokens_per_second_max=max(rates),
        over_plain=None if plain is None else median(_over(one.turns, plain.turns)),
        cores=sum(turn.cpu_seconds for turn in one.turns) / sum(turn.seconds for turn in one.turns),
        tokens_compared=None if counts is None else len(rates) * len(work.prompts) * work.new_tokens,
        tokens_differing=None if counts is None else sum(tokens for tokens, _ in counts),
        texts_differing=None if counts is None else sum(texts for _, texts in counts),
        agreement=None if reference is None else agreement(reference.turns[0].texts, one.turns[0].texts),
    )


def _rates(one: Decoded, work: Work) -> list[float]:
    """Tokens per second, round by round."""
    return [len(work.prompts) * work.new_tokens / turn.seconds for turn in one.turns]


def _over(fast: Sequence[Turn], slow: Sequence[Turn]) -> list[float]:
    """Speed of the first over that of the second, round by round: the machine's moods cancel."""
    return [theirs.seconds / ours.seconds for ours, theirs in zip(fast, slow, strict=True)]


def differing(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens that are not the same at the same place, and texts with such tokens; the texts have the same lengths."""
    counts = [sum(a != b for a, b in zip(ours, theirs, strict=True)) for ours, theirs in zip(plain, other, strict=True)]
    return sum(counts), sum(count > 0 for count in counts)


def agreement(reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Mean over the texts of the share that comes before the first difference."""
    shares = []
    for ours, theirs in zip(reference, other, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        shares.append(same / len(ours))
    return mean(shares)


def ratios(found: Sequence[Decoded]) -> list[Ratio]:
    """Our best way against each peer's best draft length, drafter by drafter."""
    ours = [one for one in found if one.way.engine == OURS]
    peers = [one for one in found if one.way.engine != OURS]
    out = []
    for engine, drafter in dict.fromkeys((one.way.engine, one.way.drafter) for one in peers):
        best = _fastest(ours)
        theirs = _fastest([o for o in peers if (o.way.engine, o.way.drafter) == (engine, drafter)])
        over = _over(best.turns, theirs.turns)
        same = [one for one in ours if one.way.drafter == drafter]
        out.append(
            Ratio(
                engine=engine,
                drafter=drafter,
                draft_length=theirs.way.draft_length,
                ours=best.way.drafter,
                ours_draft_length=best.way.draft_length,
                ratio=median(over),
                ratio_min=min(over),
                ratio_max=max(over),
                same_drafter=median(_over(_fastest(same).turns, theirs.turns)) if same else None,
            )
        )
    return out


def _fastest(among: Sequence[Decoded]) -> Decoded:
    return min(among, key=lambda one: median(turn.seconds for turn in one.turns))


def print_ways(console: "Console", found: Sequence[Decoded], made: Sequence[Row]) -> None:
    """One line per way, and beneath what the engines say of themselves."""
    from runtime.bench.output import table

    lines = [
        vars(row)
        | {"name": one.way.name, "length": one.way.length}
        | {"differing": row.tokens_compared and f"{row.tokens_differing} of {row.tokens_compared}"}
        for one, row in zip(found, made, strict=True)
    ]
    console.print(table(_COLUMNS, lines))
    for engine, precision in PRECISIONS.items():
        mine = {one.way.name: one.facts for one in found if one.way.engine == engine}
        if mine:
            _print_facts(console, engine, precision, mine)
    console.print()


def _print_facts(console: "Console", engine: str, precision: str, facts: dict[str, dict[str, str]]) -> None:
    """What all ways of an engine say, then, way by way, what only some do."""
    shared = set.intersection(*(set(about.items()) for about in facts.values()))
    first = next(iter(facts.values()))
    parts = [precision, *(f"{key} {value}" for key, value in first.items() if (key, value) in shared)]
    console.print(f"{engine}: " + "; ".join(parts), soft_wrap=True)
    for name, about in facts.items():
        own = [f"{key} {value}" for key, value in about.items() if (key, value) not in shared]
        if own:
            console.print(f"{name}: " + "; ".join(own), soft_wrap=True)


def print_ratios(console: "Console", found: Sequence[Ratio]) -> None:
    """One line per peer and drafter."""
    from runtime.bench.output import table

    def way(engine: str, drafter: str, length: int | None) -> str:
        return engine if drafter == "none" else f"{engine}, {drafter} {'own' if length is None else length}"

    title = "our fastest tokens/s / theirs, each at its best draft length (above 1: ours is faster)"
    ways = [
        {"theirs": way(r.engine, r.drafter, r.draft_length), "us": way(OURS, r.ours, r.ours_draft_length)}
        for r in found
    ]
    console.print(table(_RATIOS, [vars(r) | names for r, names in zip(found, ways, strict=True)], title))


def report(found: Sequence[Decoded], work: Work, corpus: str) -> dict[str, Any]:
    """What the JSON file says of the measurement: how it went, what ran, then rows and ratios."""
    return {
        "threads": work.threads,
        "protocol": {
            "decoding": "greedy",
            "corpus": corpus,
            "prompts": len(work.prompts),
            "prompt_tokens": [len(prompt) for prompt in work.prompts],
            "new_tokens": work.new_tokens,
            "rounds": work.rounds,
            "time": "token ids in to token ids out, the prompt included",
        },
        "engines": {one.way.name: {"models": PRECISIONS[one.way.engine]} | one.facts for one in found},
        "rows": [asdict(row) for row in rows(found, work)],
        "ratios": [asdict(ratio) for ratio in ratios(found)],
    }
