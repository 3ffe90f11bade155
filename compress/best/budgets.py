"""The budgets that a plan keeps, and what is to be best within them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compress.errors import UserError
from compress.pipeline.forecast import parse_size

GOALS = ("speed", "size", "quality")


@dataclass(frozen=True)
class Budgets:
    """What a plan keeps; None: no such budget.

    quality  most growth of perplexity, as a share: the upper end of its 95 % interval counts.
    kl       most mean KL(original ‖ compressed), nats a token.
    disk     most bytes of the model's files of weights.
    memory   most bytes of memory: weights as the kernels hold them, keys and values, and the draft's.
    latency  most milliseconds a token while decoding, on average, by whoever drafts best.
    ttft     most milliseconds to the first token of a prompt, whose length the question says; nothing predicts it.
    goal     what is to be best within them: one of GOALS.
    """

    quality: float | None = None
    kl: float | None = None
    disk: int | None = None
    memory: int | None = None
    latency: float | None = None
    ttft: float | None = None
    goal: str = "speed"

    @classmethod
    def parse(
        cls,
        quality: str | None,
        kl: float | None,
        disk: str | None,
        memory: str | None,
        latency: float | None,
        ttft: float | None,
        goal: str,
    ) -> "Budgets":
        """From the command line. Raises UserError for what cannot be read, and for budgets that are no question."""
        if goal not in GOALS:
            raise UserError(f"--for: expected {', '.join(GOALS)}, found {goal!r}: correct it")
        for option, value in (("--kl", kl), ("--latency", latency), ("--ttft", ttft)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"{option}: expected a number above 0, found {value}: correct it")
        if quality is not None and kl is not None:
            raise UserError("--quality and --kl: expected one budget of quality, found both: leave one out")
        found = cls(
            None if quality is None else _share(quality),
            kl,
            None if disk is None else parse_size(disk, "--disk"),
            None if memory is None else parse_size(memory, "--memory"),
            latency,
            ttft,
            goal,
        )
        if goal == "quality" and (found.disk, found.memory, found.latency) == (None, None, None):
            raise UserError(
                "--for quality: expected --disk, --memory or --latency, found none: without them the original is best"
            )
        if goal != "quality" and found.figure_limit is None:
            raise UserError(
                f"--for {goal}: expected --quality or --kl, found none: without them two bits everywhere are best"
            )
        return found

    @property
    def figure_limit(self) -> float | None:
        """The most that the figure of quality may be: KL, or the logarithm of the growth of perplexity."""
        if self.kl is not None:
            return self.kl
        return None if self.quality is None else math.log1p(self.quality)

    def shown(self, figure: float) -> str:
        """A figure of quality in the words of its budget."""
        if self.kl is not None:
            return f"KL {figure:.4f} nats"
        return f"perplexity {100 * math.expm1(figure):+.2f} %"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for plan.json."""
        return {
            "quality": self.quality,
            "kl": self.kl,
            "disk_bytes": self.disk,
            "memory_bytes": self.memory,
            "latency_ms": self.latency,
            "ttft_ms": self.ttft,
            "for": self.goal,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Budgets":
        """What `to_dict` wrote."""
        names = ("quality", "kl", "disk_bytes", "memory_bytes", "latency_ms", "ttft_ms", "for")
        return cls(*(data[name] for name in names))


def _share(text: str) -> float:
    """ "1%" or "0.01" as 0.01. Raises UserError for anything else, 0 and less among it."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", text)
    value = 0.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 < value < 10:
        raise UserError(f"--quality: expected a growth of perplexity such as 1%, found {text!r}: correct it")
    return value
