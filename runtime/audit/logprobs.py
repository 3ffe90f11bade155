"""Check of the log-probabilities that an engine returns, against the known model's in float64."""

from dataclasses import dataclass, replace

import numpy as np

from runtime.audit.asks import Budget, Engine
from runtime.audit.sampled import CHUNK, PROMPTS, Known, Setting, asks, letters_of


@dataclass(frozen=True)
class LogprobsRow:
    """Of texts with or without drafts: tokens that had a log-probability, the largest and mean error in nats."""

    drafts: bool
    tokens: int
    largest: float
    mean: float


def check(engine: Engine, known: Known, budget: Budget, new_tokens: int, seed: int) -> list[LogprobsRow]:
    """A chunk of texts for each prompt and mode, sampled at temperature 1; nothing of a mode that returns none."""
    rows = []
    for drafts in (False, True):
        if not drafts and not engine.has_plain:
            continue
        asked = asks(known, Setting(), CHUNK * len(PROMPTS), new_tokens, seed, drafts)
        answers = budget.ask(engine, [replace(one, logprobs=True) for one in asked[::8]])
        errors: list[float] = []
        for ask, answer in zip(asked[::8], answers, strict=False):
            numbers = letters_of(known.target, answer)
            count = min(len(numbers), len(answer.logprobs))
            if not count:
                continue
            ids = np.array([*known.target.letters, known.target.other])[numbers][None]
            probs, _ = known.target.probabilities(known.target.next_logits(ask.prompt, ids), 1.0)
            exact = np.log(probs[0, np.arange(count), numbers[:count]])
            errors += np.abs(exact - np.array(answer.logprobs[:count])).tolist()
        if errors:
            rows.append(LogprobsRow(drafts, len(errors), float(np.max(errors)), float(np.mean(errors))))
    return rows
