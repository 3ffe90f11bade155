"""The report's `speed` and `lossless` sections: original, compressed and speculative decoding in one runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.progress import Progress
from compress.report import speculation
from compress.report.not_measured import NO_SPEED, TOO_FEW, Reasons, covers, null_paths
from compress.report.pairing import ORIGINAL, Contest, Drafting, compete, is_tree
from compress.report.schema_speed import PLAIN, Lossless, PlainSpeed, Speculation, Speed
from compress.report.timing import Work, repeated_share
from runtime.contract import no_drafts
from runtime.sampling.detokenize import require_same_vocabulary
from runtime.sampling.params import Sampling
from runtime.speculate import lossless_class
from runtime.speculative.costs import measure_costs

if TYPE_CHECKING:
    from runtime.model.load import Model

COST_SECONDS = 5.0  # for timing forwards of several widths
_CONTEXT = 128  # tokens before the timed forwards
_NOT_SPECULATED = Speculation(**dict.fromkeys(Speculation.model_fields))
_NOT_COMPARED = Lossless(**dict.fromkeys(Lossless.model_fields))
_TEACHER_FORCED = ("speed.teacher_forced_agreement", "speed.teacher_forced_agreement_t1")
_CHAIN_ONLY = ("speed.per_token_acceptance", "speed.iid_speedup")
_NOBODY = "no drafter was to be timed (--drafter none)"


@dataclass(frozen=True)
class SpeedResult:
    """The `speed` and `lossless` sections, and why some of their figures are null."""

    speed: Speed
    lossless: Lossless
    not_measured: Reasons


@dataclass(frozen=True)
class Job:
    """What is measured.

    work          the prompts, short enough for the new tokens; groups: of each its task, where they have tasks.
    windows       (E, L) held-out tokens for teacher forcing.
    drafter       the only one to be timed; None: all that there are.
    draft_length  of all drafters; None: chosen every round by what pays.
    """

    original: "Model"
    drafting: Drafting
    work: Work
    windows: torch.Tensor
    groups: Sequence[str] = ()
    drafter: str | None = None
    draft_length: int | None = None
    seed: int = 0

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names of those to be timed."""
        if self.drafter is None:
            return self.drafting.names
        return () if self.drafter == PLAIN else (self.drafter,)


def measure(job: Job, progress: Progress) -> SpeedResult:
    """Everything of `speed` but the baselines, and `lossless`.

    Trees of drafts have no figures that only a chain has. Where the target cannot verify drafts the speculative
    figures are null with that reason. Raises UserError for a draft with another vocabulary.
    """
    compressed, draft = job.drafting.target, job.drafting.draft
    if draft is not None:
        # The runtime would encode such a draft's text again; the report's agreement figures need one vocabulary.
        require_same_vocabulary(compressed.tokenizer, draft.tokenizer)
    reason = no_drafts(compressed.decoder) or None
    drafters = job.drafters if reason is None else ()
    contest = compete(job.original, job.drafting, drafters, job.draft_length, job.work, progress)
    missing: Reasons = {"speed.*.energy_j": "no energy counter was read"}
    said, lossless = _NOT_SPECULATED, _NOT_COMPARED
    if reason is not None:
        missing |= dict.fromkeys((*(f"speed.{name}" for name in Speculation.model_fields), "lossless"), reason)
    elif contest.fastest is None:
        said = speculation.without_drafts(contest)
        missing |= dict.fromkeys(
            [f"speed.{path}" for path in null_paths(said.model_dump()) if "." not in path], _NOBODY
        )
        missing |= {"lossless": _NOBODY, "speed.draft_length": _NOBODY}
    else:
        said, lossless = _speculated(job, contest)
        if is_tree(contest.fastest):
            missing |= dict.fromkeys(_CHAIN_ONLY, "a tree was drafted, and the figure is a chain's")
        if draft is None:
            missing |= dict.fromkeys(
                _TEACHER_FORCED, "there is no draft model, which predicts a token at every position"
            )
    speed = Speed(**dict(_plain(job, contest)), **dict(said))
    # Figures that so few tokens, or a drafter that proposed none, cannot give; baselines come later, and the table's
    # nulls are statements.
    paths = [
        path for path in null_paths(speed.model_dump()) if path != "baselines" and not path.startswith("pairings.")
    ]
    bare = [f"speed.{path}" for path in paths]
    too_few = {path: TOO_FEW for path in bare if not any(covers(reason, path) for reason in missing)}
    return SpeedResult(speed, lossless, missing | too_few)


def not_measured() -> SpeedResult:
    """What `--no-speed` leaves: every key null, with the reason."""
    nothing = Speed(**dict.fromkeys(Speed.model_fields))
    return SpeedResult(nothing, _NOT_COMPARED, {"speed": NO_SPEED, "lossless": NO_SPEED})


def _plain(job: Job, contest: Contest) -> PlainSpeed:
    plain = contest.timed[PLAIN]
    return PlainSpeed(
        prompts=len(job.work.prompts),
        new_tokens=job.work.new_tokens,
        repeats=len(plain.metrics),
        threads=job.drafting.target.decoder.threads,
        repeated_4gram_share=repeated_share(plain.tokens[0]),
        draft_length=speculation.draft_length(contest, job.draft_length),
        baselines=None,
        original=contest.timed[ORIGINAL].figures(),
        compressed=plain.figures(),
    )


def _speculated(job: Job, contest: Contest) -> tuple[Speculation, Lossless]:
    """Of a contest in which somebody drafts."""
    compressed, draft, prompts = job.drafting.target, job.drafting.draft, job.work.prompts
    name, length = contest.fastest, speculation.draft_length(contest, job.draft_length)
    assert name is not None and length is not None
    text = [
        token for prompt, new in zip(prompts, contest.timed[PLAIN].tokens[0], strict=True) for token in (*prompt, *new)
    ]
    # To time forwards after; it leaves both models room for the widest one.
    positions = min(m.decoder.max_positions for m in (compressed, draft) if m is not None)
    costs = measure_costs(compressed, text[: max(1, min(_CONTEXT, positions // 2))], length, COST_SECONDS)
    way, sampled = contest.ways[name], (job.work.new_tokens, length, job.seed)
    said = speculation.speculation(
        contest,
        costs,
        speculation.acceptance_when_sampling(way, prompts, sampled),
        (None, None) if draft is None else speculation.teacher_forced_agreement(compressed, draft, job.windows),
        job.groups,
        job.draft_length,
    )
    rows = said.pairings or []
    lossless = Lossless(
        class_=lossless_class(compressed, way.verify, Sampling()),
        verify="greedy",
        tokens_compared=sum(row.tokens_compared or 0 for row in rows),
        mismatches=sum(row.mismatches or 0 for row in rows),
    )
    return said, lossless
