"""The finalists timed in turns: plain decoding and the most promising drafters of each, and the original, too."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.best.acceptance import Drafts, Pace, pace
from compress.best.candidates import Measured
from compress.best.costs import WIDTHS
from compress.progress import Progress
from compress.report.pairing import WORTH, Drafting
from compress.report.schema_speed import PLAIN
from compress.report.timing import Timed, Work, time_interleaved
from runtime.speculate import Speculator

if TYPE_CHECKING:
    from runtime.model.load import Model

ORIGINAL = "original"
# The most drafters of each finalist that are timed, of those that are predicted to pay at all: fewer where decoding all
# prompts in every way would take longer than there is time for.
_DRAFTERS = 3
# Up to this γ a drafter is timed with no shorter one beside it.
_SHORT = 4
# How often a long prompt is read, and no repeat is begun that would take longer than this.
_PREFILLS, _PREFILL_SECONDS = 5, 30.0


@dataclass(frozen=True)
class Way:
    """One way of decoding a model (by its key): tokens a second while decoding, the prompts' time left out.

    draft_length  γ; None: chosen every round, or nothing drafts.
    """

    model: str
    drafter: str
    tokens_per_second: float
    draft_length: int | None = None

    @property
    def latency_ms(self) -> float:
        """Milliseconds a token, on average."""
        return 1e3 / max(self.tokens_per_second, 1e-9)

    @classmethod
    def of(cls, model: str, drafter: str, draft_length: int | None, timed: Timed) -> "Way":
        """What was timed."""
        return cls(model, drafter, timed.decode_tokens_per_second or timed.tokens_per_second or 0.0, draft_length)


def hold(
    original: "Model",
    finalists: Mapping[str, "Model"],
    draft: "Model | None",
    measured: Mapping[str, Measured],
    drafts: Sequence[Drafts],
    beyond: Sequence[float],
    work: Work,
    progress: Progress,
) -> list[Way]:
    """Every way's figures: of the original plain decoding, of each finalist (by key) drafters too.

    Each drafter with γ chosen every round; with γ as it is predicted to pay the most, which costs no choosing; and with
    half of that where it is long: what a long draft's last tokens bring is the least certain part of a prediction.
    """
    ways: dict[tuple[str, str, int | None], Speculator] = {(ORIGINAL, PLAIN, None): Speculator(original)}
    count = _drafters(list(finalists), measured, work)
    for key, model in finalists.items():
        ways[key, PLAIN, None] = Speculator(model)
        drafting = Drafting(model, draft)
        for one in promising(measured[key].forward_ms, drafts, beyond)[:count]:
            for length in lengths(one.draft_length):
                ways[key, one.drafter, length] = drafting.speculator(one.drafter, length)
    timed = time_interleaved({str(key): way for key, way in ways.items()}, work, progress)
    return [Way.of(*key, timed[str(key)]) for key in ways]


def first_tokens(models: Mapping[str, "Model"], prompt: Sequence[int], progress: Progress) -> dict[str, float]:
    """Milliseconds to the first token after a prompt, of each model, taken in turns: the median."""
    ways = {key: Speculator(model) for key, model in models.items()}
    timed = time_interleaved(ways, Work([prompt], 1, _PREFILLS, _PREFILL_SECONDS), progress)
    return {key: 1e3 * one.seconds for key, one in timed.items()}


def promising(forward_ms: Mapping[int, float], drafts: Sequence[Drafts], beyond: Sequence[float]) -> list[Pace]:
    """The drafters that are predicted to pay, the fastest first, on the forwards that were measured.

    Not one that is the last of a faster chain: the chain asks it wherever the first has nothing to say.
    """
    rounds = {width: forward_ms[width] + more for width, more in zip(WIDTHS, beyond, strict=True)}
    paying = [found for one in drafts if (found := pace(rounds, [one])).drafter != PLAIN]
    ordered = sorted(paying, key=lambda found: -found.tokens_per_second)
    names = [found.drafter for found in ordered]
    return [
        found
        for place, found in enumerate(ordered)
        if not any(name.endswith(f"+{found.drafter}") for name in names[:place])
    ]


def lengths(predicted: int) -> list[int | None]:
    """The γ with which a drafter is timed; None: chosen every round."""
    return [None, predicted] if predicted <= _SHORT else [None, predicted, -(-predicted // 2)]


def _drafters(keys: Sequence[str], measured: Mapping[str, Measured], work: Work) -> int:
    """How many drafters of each finalist there is time for, if none makes decoding faster: at least one."""
    once = 1e-3 * len(work.prompts) * work.new_tokens * max(measured[key].forward_ms[1] for key in keys)
    ways = int(work.seconds / once / len(keys))
    # Plain decoding, and up to three ways for each drafter.
    return min(_DRAFTERS, max(1, (ways - 1) // 3))


def fastest(ways: Sequence[Way], model: str) -> Way:
    """A model's fastest way; a drafter must gain more than the noise over plain decoding, as the report asks for."""
    mine = [way for way in ways if way.model == model]
    best = max(mine, key=lambda way: way.tokens_per_second)
    plain = next(way for way in mine if way.drafter == PLAIN)
    return best if best.tokens_per_second >= WORTH * plain.tokens_per_second else plain
