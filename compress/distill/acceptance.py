"""How well a draft predicts its target, before and after it was trained."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.distill.teacher import of_decoder
from compress.training.data import portions
from runtime.engine.metrics import total
from runtime.model.load import Model
from runtime.speculate import Speculator

DRAFT_LENGTH = 4


@dataclass(frozen=True)
class Acceptance:
    """acceptance_rate  accepted over drafted tokens, greedy, at γ = 4; tokens_per_round goes with it.
    agreement        share of positions of held-out text at which both have the same most probable token.
    agreement_t1     mean Σ min(p, q) there: the chance that a token drawn at temperature 1 is accepted.
    """

    acceptance_rate: float | None
    tokens_per_round: float | None
    agreement: float
    agreement_t1: float


def measure(
    target: Model, draft: Model, windows: Tensor, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Acceptance:
    """Both ways of asking: `prompts` continued by speculation, and all windows (E, L) int64 read by both.

    Greedy decoding and fixed windows: a pure function of the models. acceptance_rate is None where nothing was drafted.
    """
    speculator = Speculator(target, draft, DRAFT_LENGTH)
    found = total([result.metrics for result in speculator.generate(prompts, new_tokens, stop=())])
    return Acceptance(found.acceptance_rate, found.tokens_per_round, *teacher_forced(target, draft, windows))


def teacher_forced(target: Model, draft: Model, windows: Tensor) -> tuple[float, float]:
    """(agreement, agreement_t1) after every token of the windows.

    The report's own figure (report/speed.py) reads 2,048 tokens, whose error is as large as what training gains.
    """
    # A draft may have fewer positions than the target.
    windows = windows[:, : min(target.decoder.max_positions, draft.decoder.max_positions)]
    width = min(target.decoder.vocab_size, draft.decoder.vocab_size)
    asked, answered = of_decoder(target.decoder), of_decoder(draft.decoder)
    agreed = overlap = 0.0
    for rows in portions(windows):
        theirs, ours = asked(rows), answered(rows)
        agreed += float((theirs.argmax(dim=-1) == ours.argmax(dim=-1)).sum())
        p, q = theirs.softmax(dim=-1)[..., :width], ours.softmax(dim=-1)[..., :width]
        overlap += float(torch.minimum(p, q).sum())
    return agreed / windows.numel(), overlap / windows.numel()
