"""What is asked of the planner, and what its figures depend on."""

from dataclasses import dataclass
from typing import Any

from compress.artifact import manifest
from compress.best.budgets import Budgets
from compress.best.space import CACHES, OPTIONS
from compress.context import RunContext
from compress.pipeline.inputs import RunInputs


@dataclass(frozen=True)
class Question:
    """What is asked of the planner.

    context     of all runs: model, draft, out, text, threads, seed; its recipe is not looked at.
    wanted      candidates that keep all budgets and are timed; minutes: after which none is begun.
    tokens      of context in the cache, times requests at once (`batch`), that memory has to hold.
    prompt_tokens  of the prompt whose first token the budget of that name is about.
    """

    context: RunContext
    budgets: Budgets
    wanted: int = 3
    minutes: float = 10.0
    tokens: int = 512
    batch: int = 1
    prompt_tokens: int = 512

    def search(self) -> dict[str, Any]:
        """What candidates are looked for; JSON data as it is read back."""
        asked = {"wanted": self.wanted, "minutes": self.minutes, "prompt_tokens": self.prompt_tokens}
        return {**self.budgets.to_dict(), **asked}


def fingerprint(asked: Question, inputs: RunInputs) -> dict[str, Any]:
    """What the figures depend on; JSON data as it is read back."""
    context = asked.context
    names = ("calib", "samples", "seq_len", "eval_tokens", "new_tokens", "threads", "seed")
    return {
        "figure": "perplexity" if asked.budgets.kl is None else "kl",
        "model": inputs.target.fingerprint(),
        "draft": None if inputs.draft is None else inputs.draft.fingerprint(),
        "options": [str(option) for option in (*OPTIONS, *CACHES)],
        "versions": manifest.versions(),
        "context": asked.tokens,
        "batch": asked.batch,
        **{name: getattr(context, name) for name in names},
    }
