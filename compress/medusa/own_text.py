"""What drafters on a packed target's hidden states learn from: what the target itself writes, and its states there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compress.errors import UserError
from compress.medusa.hidden_states import Continuations, HiddenStates, Source, collect
from compress.recipe.training import Budget
from compress.training.contract import StageContext
from runtime import Model
from runtime.checkpoints.drafter_files import weights_digest

# Windows of the training text that are set aside: they choose a tree, and as many as WATCHED the best weights.
_ASIDE, WATCHED = 64, 32
# Held-out windows that measure what a drafter is worth.
_MEASURED = 64
# Share of a budget in minutes that making the text may take.
_COLLECTING = 0.25


class OwnText(Protocol):
    """What a stage says of its text: the keys of compress.recipe's Medusa and BlockDraft."""

    @property
    def continuations(self) -> Continuations: ...

    @property
    def prompt(self) -> float | tuple[float, ...]: ...

    @property
    def as_is(self) -> float: ...

    @property
    def samples(self) -> int: ...

    @property
    def max_epochs(self) -> int: ...


@dataclass(frozen=True)
class Wanted:
    """What is made of windows: what follows their first tokens, so many as `prompts` say by turns, but for a share that
    stays `as_is`; and which states of it are kept."""

    continuations: Continuations
    prompts: tuple[int, ...]
    taps: tuple[int, ...] = ()
    as_is: float = 0.0


@dataclass(frozen=True)
class Text:
    """What a drafter is trained on, and what not: `watched` is for the best weights and a tree, `measured` for figures.

    aside    the windows of `watched` before the target went on from their prompts.
    first    the first position whose hidden state is learned from: where the model's own text begins at the earliest.
    begins   (windows,) int64 of `train`, and of `watched`: in each of them where that begins, or could.
    prompts  tokens of windows that are the text's own, by turns.
    """

    train: HiddenStates
    watched: HiddenStates
    aside: Tensor
    measured: Tensor
    first: int
    begins: tuple[Tensor, Tensor]
    prompts: tuple[int, ...]

    def asked(self) -> list[tuple[list[list[int]], int]]:
        """What measures a drafter: held-out windows' prompts, one length at a time, and how many tokens follow."""
        count, length = len(self.prompts), self.measured.shape[1]
        turns = [(self.measured[turn::count, :size], size) for turn, size in enumerate(self.prompts)]
        return [(prompts.tolist(), length - size) for prompts, size in turns if len(prompts)]


def make_text(stage: OwnText, context: StageContext, target: Model, least: int, taps: Sequence[int] = ()) -> Text:
    """The windows of the training text and of the held-out one, continued by the target as the stage says.

    least  tokens of its own that a window needs.
    taps   which states are kept (hidden_states.collect).

    Raises UserError for windows that are too short, and a text of less than two.
    """
    length, prompts = context.settings.length, prompts_of(stage, context, least)
    windows = cut(context.tokens, length, stage.samples + _ASIDE, context.run.seed, "the training text")
    if len(windows) < 2:
        raise UserError(f"the training text is too short: expected two windows of {length} tokens, found one")
    measured = cut(context.held_out, length, _MEASURED, context.run.seed, "the held-out text")
    aside, rest = windows.split([apart := min(_ASIDE, -(-len(windows) // 8)), len(windows) - apart])
    seconds = None if context.budget.minutes is None else 60 * context.budget.minutes * _COLLECTING
    how = Wanted(stage.continuations, prompts, tuple(taps), stage.as_is)
    # What chooses the best weights is what the drafter will be asked about.
    watched = continued(replace(how, as_is=0.0), context, target, aside, context.work / "watched")
    train_on = continued(how, context, target, rest[: stage.samples], context.work / "states", seconds)
    width = max(1, len(taps)) * target.decoder.hidden_size
    context.run.note(
        f"the target's own text: {len(train_on)} windows of {length} tokens to train on, "
        f"continuations: {stage.continuations}; "
        f"hidden states take {len(train_on) * length * width * 2 / 1e6:.0f} MB"
    )
    # Where windows are prompts with what the model wrote, only its own part is what it will be asked about.
    first = 0 if stage.continuations == "none" else min(prompts) - 1
    begins = source_of(how, context, rest[: stage.samples]).begins()[: len(train_on)]
    both = begins, source_of(replace(how, as_is=0.0), context, aside).begins()
    return Text(train_on, watched, aside, measured, first, both, prompts)


def continued(
    how: Wanted, context: StageContext, target: Model, windows: Tensor, folder: Path, seconds: float | None = None
) -> HiddenStates:
    """The windows as the target goes on from their prompts, with its hidden states, in that folder."""
    source = source_of(how, context, windows)
    about: dict[str, Any] = {
        "target": weights_digest(target.path),
        "continuations": how.continuations,
        "prompts": list(how.prompts),
    }
    about |= ({"taps": list(how.taps)} if how.taps else {}) | ({"as_is": how.as_is} if how.as_is else {})

    def told(done: int, total: int) -> None:
        context.run.progress("states", done, total)

    return collect(target, source, folder, about | {"windows": len(windows)}, seconds, told, how.taps)


def source_of(how: Wanted, context: StageContext, windows: Tensor) -> Source:
    """How the windows are made into text."""
    return Source(windows, how.continuations, how.prompts, context.run.seed, how.as_is)


def prompts_of(stage: OwnText, context: StageContext, least: int) -> tuple[int, ...]:
    """Tokens of windows that are the text's own, by turns. Raises UserError where fewer than `least` are left."""
    length, shares = context.settings.length, stage.prompt if isinstance(stage.prompt, tuple) else (stage.prompt,)
    prompts = tuple(max(1, int(length * share)) for share in shares)
    if length - max(prompts) < least:
        raise UserError(
            f"training.length: expected at least {least} tokens beside the prompt's {max(prompts)}, found {length}: "
            "lengthen it"
        )
    return prompts


def cut(tokens: Tensor | NDArray[np.integer], length: int, count: int, seed: int, name: str) -> Tensor:
    """At most `count` windows (n, length) int64 of a stream, or of rows that are each cut by themselves.

    Seeded, without overlap. Raises UserError for a text of less than one window.
    """
    rows = np.asarray(tokens)
    rows = rows[None] if rows.ndim == 1 else rows
    each = rows.shape[1] // length if length else 0
    if not each * len(rows):
        raise UserError(f"{name} is too short: expected one window of {length} tokens at least, found {rows.size}")
    order = np.random.default_rng(seed).permutation(each * len(rows))[:count]
    found = [rows[number // each, number % each * length :][:length] for number in order]
    return torch.from_numpy(np.stack(found).astype(np.int64))


def budget_left(stage: OwnText, context: StageContext, text: Text) -> Budget:
    """The budget without what making the text took, which is kept with it: a resumed run trains as long.

    Minutes end after the stage's epochs over the text, too: a fast machine would have it learned by heart.
    """
    if context.budget.minutes is None:
        return context.budget
    spent = min(_COLLECTING, text.train.seconds / 60 / context.budget.minutes)
    most = stage.max_epochs * len(text.train) * context.settings.length
    return Budget(minutes=context.budget.minutes * (1 - spent), most_tokens=most)
