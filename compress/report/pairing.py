"""Who can draft for a run's target, each timed beside plain decoding: the report's table, and who won.

1. Where the time there is does not do for all drafters that the run has, they decode a few tokens in a trial. The
   slower ones keep the trial's figures, and say so.
2. The others decode all prompts, interleaved with plain decoding, each with γ chosen every round by what it learns.
3. The fastest wins where it beats plain decoding by `WORTH`; less is within the noise, and plain decoding wins.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.progress import Progress, silent
from compress.report.schema_speed import PLAIN, Pairing
from compress.report.timing import Timed, Work, compare, time_interleaved
from runtime.engine.metrics import Metrics, predicted_speedup
from runtime.errors import UserError
from runtime.machine import free_memory
from runtime.model.load import load
from runtime.speculate import Speculator
from runtime.speculative.costs import width_cost
from runtime.speculative.draft import parts
from runtime.speculative.drafters.by_name import make

if TYPE_CHECKING:
    from runtime.model.load import Model

ORIGINAL = "original"  # among the ways that are timed: no drafter's name
# What a drafter must gain over plain decoding to win: the fastest of several rows is partly the luckiest.
WORTH = 1.01
# The trial: so many prompts and repeats (in the first one drafters learn what pays), and seconds.
_TRIAL_PROMPTS, _TRIAL_REPEATS, _TRIAL_SECONDS = 2, 2, 15.0
# Who is slower than this share of the fastest way's speed in the trial is not timed after it.
_HOPELESS = 0.8


@dataclass(frozen=True)
class Drafting:
    """What there is to draft with.

    target   the compressed model.
    draft    of the target's vocabulary.
    heads    the directory of Medusa heads.
    planes   the target has int8 layers, of which `nested` drafts with the upper four bits.
    threads  as for `load`.
    """

    target: "Model"
    draft: "Model | None" = None
    heads: Path | None = None
    planes: bool = False
    threads: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The drafters, by the names that commands take."""
        found = ["lookup", "suffix"]
        if self.draft is not None:
            found += ["model", "lookup+model", "suffix+model", "tree"]
        if self.heads is not None:
            found += ["medusa", "lookup+medusa"]
        if self.target.block_path is not None:
            found += ["block", "lookup+block"]
        return (*found, *(["nested"] if self.planes else []))

    def speculator(self, name: str, draft_length: int | None) -> Speculator:
        """The target with this drafter. Raises UserError where that cannot be.

        For `nested` the target is loaded once more, in the layout that it needs: plain decoding keeps its own.
        """
        target = self.target
        if is_tree(name) and (why := getattr(target.decoder, "no_trees", None)):
            raise UserError(why)
        if "nested" in parts(name):
            _require_room(target)
            target = load(target.path, device=str(target.decoder.device), threads=self.threads, planes=True)
        heads = self.heads if "medusa" in parts(name) else None
        return Speculator(target, make(target, name, self.draft, heads=heads), draft_length)


def is_tree(name: str) -> bool:
    """Whether this drafter proposes trees, of which γ counts the nodes."""
    return not {"tree", "medusa", "block"}.isdisjoint(parts(name))


@dataclass(frozen=True)
class Contest:
    """All ways of decoding that were timed.

    ways     those that decoded all prompts, by drafter; PLAIN and ORIGINAL are among them.
    timed    what they took.
    trial    of the others, and of PLAIN, what the trial took.
    refused  why drafters that the run has cannot draft.
    """

    ways: Mapping[str, Speculator]
    timed: Mapping[str, Timed]
    trial: Mapping[str, Timed] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str | None:
        """The fastest of those that draft, whether it pays or not; None where nobody does."""
        drafting = [name for name in self.timed if name not in (PLAIN, ORIGINAL)]
        # Rather one that has drafted: faster without drafts is faster by chance.
        return max(
            drafting, key=lambda name: (self._gains(name), self._drafted(name), self.speedup(name)), default=None
        )

    @property
    def winner(self) -> str:
        """Who is to draft: the fastest, or nobody."""
        best = self.fastest
        return best if best is not None and self._gains(best) and self.speedup(best) >= WORTH else PLAIN

    def _gains(self, name: str) -> bool:
        """Whether its drafts gain enough tokens a round for what it must gain: a round takes a forward at least."""
        return (self.timed[name].typical.tokens_per_round or 1.0) >= WORTH

    def _drafted(self, name: str) -> bool:
        return self.timed[name].overall.drafted > 0

    def speedup(self, name: str) -> float:
        """Over plain decoding of the same prompts."""
        return speedup(self.timed[name], self.timed[PLAIN])

    def rows(self, widths: Mapping[int, float]) -> list[Pairing]:
        """The table: the winner, the others from the fastest on, those of the trial, those that cannot draft.

        widths  what target forwards of several widths cost over one of width 1.
        """
        order = sorted((n for n in self.timed if n != ORIGINAL), key=lambda n: (n != self.winner, -self.speedup(n)))
        rows = [_row(name, self.timed[name], self.timed[PLAIN], widths) for name in order]
        left = [name for name in self.trial if name != PLAIN]
        for name in sorted(left, key=lambda name: -speedup(self.trial[name], self.trial[PLAIN])):
            rows.append(
                _row(name, self.trial[name], self.trial[PLAIN], widths, "slower in the trial, so timed there only")
            )
        return rows + [_refused(name, why) for name, why in self.refused.items()]


def compete(
    original: "Model",
    drafting: Drafting,
    names: Sequence[str],
    draft_length: int | None,
    work: Work,
    progress: Progress,
) -> Contest:
    """Times plain decoding of both models and the target with these drafters.

    draft_length  of all drafters; None: chosen every round. Of one drafter, which somebody asked for, there is no
                  trial, and a UserError of its making is raised.
    """
    ways: dict[str, Speculator] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            ways[name] = drafting.speculator(name, draft_length)
        except UserError as error:
            if len(names) == 1:
                raise
            refused[name] = str(error)
    plain, trial = Speculator(drafting.target), dict[str, Timed]()
    if len(ways) > 1 and not _enough_time(plain, len(ways), work):
        short = Work(work.prompts[:_TRIAL_PROMPTS], work.new_tokens, _TRIAL_REPEATS, _TRIAL_SECONDS)
        trial = time_interleaved({PLAIN: plain, **ways}, short, lambda _, done, total: progress("trial", done, total))
        kept = finalists({name: one.tokens_per_second or 0.0 for name, one in trial.items()}, work)
        ways = {name: ways[name] for name in kept}
        trial = {name: one for name, one in trial.items() if name not in kept}
    every = {ORIGINAL: Speculator(original), PLAIN: plain, **ways}
    return Contest(every, time_interleaved(every, work, progress), trial, refused)


def _enough_time(plain: Speculator, drafters: int, work: Work) -> bool:
    """Whether all repeats of all ways fit into the time there is, if each takes as long as plain decoding does."""
    once = time_interleaved({PLAIN: plain}, Work(work.prompts[:1], work.new_tokens, 1), silent)[PLAIN]
    return once.seconds * len(work.prompts) * work.repeats * (drafters + 2) <= work.seconds


def finalists(rates: Mapping[str, float], work: Work) -> list[str]:
    """Who is worth timing, by the trial's tokens per second: always one, and as many as there is time for.

    rates  PLAIN's is among them, and stands for the original's, too.
    """
    tokens = len(work.prompts) * work.new_tokens * work.repeats
    spent = 2 * tokens / max(rates[PLAIN], 1e-9)
    enough = _HOPELESS * max(rates.values())
    kept: list[str] = []
    for name in sorted((name for name in rates if name != PLAIN), key=lambda name: -rates[name]):
        spent += tokens / max(rates[name], 1e-9)
        if not kept or (rates[name] >= enough and spent <= work.seconds):
            kept.append(name)
    return kept


def speedup(one: Timed, plain: Timed) -> float:
    """How much faster one way is than plain decoding, on the same prompts."""
    return plain.seconds / max(one.seconds, 1e-9)


@dataclass(frozen=True)
class Costs:
    """What a prediction is made of: γ, c, v as they were on average, and what they promise.

    draft_cost  None where nothing was drafted. The others are None without rounds, without `widths` all but γ.
    """

    draft_length: float | None
    draft_cost: float | None
    width_cost: float | None
    speedup: float | None

    @classmethod
    def of(cls, counts: Metrics, plain: Metrics, widths: Mapping[int, float]) -> "Costs":
        """Of the counts of one way's runs, beside plain decoding's: τ / (γc + v), v over the widths of its forwards."""
        gamma, tau, step = counts.mean_draft_length, counts.tokens_per_round, plain.step_seconds
        if not widths or gamma is None or tau is None or not step:
            return cls(gamma, None, None, None)
        rounds = enumerate(counts.draft_lengths)
        v = sum(count * width_cost(widths, 1 + length) for length, count in rounds) / counts.rounds
        # γc: looking for drafts costs time where none are found, too.
        drafting = counts.draft_seconds / counts.rounds / step
        return cls(gamma, counts.draft_cost_ratio(step), v, predicted_speedup(tau, 1, drafting, v))


def _row(name: str, one: Timed, plain: Timed, widths: Mapping[int, float], why: str | None = None) -> Pairing:
    drafts = name != PLAIN
    costs = Costs.of(one.typical, plain.typical, widths)
    compared, mismatches = compare([t for r in plain.tokens for t in r], [t for r in one.tokens for t in r])
    return Pairing(
        drafter=name,
        measured="all prompts" if why is None else "trial",
        tokens_per_second=one.tokens_per_second,
        speedup=speedup(one, plain),
        acceptance_rate=one.overall.acceptance_rate,
        tokens_per_round=one.typical.tokens_per_round,
        draft_length=costs.draft_length if drafts else None,
        predicted_speedup=costs.speedup if drafts else None,
        tokens_compared=compared if drafts else None,
        mismatches=mismatches if drafts else None,
        why=why,
    )


def _refused(name: str, why: str) -> Pairing:
    nothing: dict[str, Any] = dict.fromkeys(Pairing.model_fields)
    return Pairing(**{**nothing, "drafter": name, "why": why})


def _require_room(target: "Model") -> None:
    """Raises UserError where a second copy of the weights would take more than half of the free memory."""
    stored = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
    free = free_memory()
    if target.decoder.device.type == "cpu" and free is not None and stored > free / 2:
        raise UserError(
            f"nested was not timed: the target once more would take {stored / 1e9:.1f} GB of the {free / 1e9:.1f} GB of"
            " free memory"
        )
