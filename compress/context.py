"""What is asked of a run: one record that goes from the command to the report.

A new option is a field here, with its range, a parameter of the command (compress/run.py), and the place that uses it.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifact import SHARD_BYTES
from compress.errors import UserError
from compress.progress import Note, Progress, silent, unsaid

if TYPE_CHECKING:
    from compress.recipe import Recipe


def _number(default: int | None, least: int, most: int) -> Any:
    """A field that holds a whole number from `least` to `most`."""
    return field(default=default, metadata={"range": (least, most)})


# γ of what is timed beside the report's own drafters, transformers' assistant and exports, where none is asked for.
FIXED_DRAFT_LENGTH = 4
# Drafters whose speed a report can have, by their names.
_SINGLE = ("none", "model", "tree", "lookup", "suffix", "nested", "medusa", "block", "mtp")
TIMED = (*_SINGLE, "lookup+model", "suffix+model", "lookup+medusa", "lookup+block")
# Rows of compress/report/baselines.py, of which the ones after the first take a minute together.
BASELINES = {"none": 0, "eager": 1, "all": 3}


@dataclass(frozen=True)
class RunContext:
    """A run's recipe and options. `of` fills in what the recipe says; a context that exists is within its ranges.

    model           directory, run folder or hub name; None: the embedded pair's target.
    draft           the same, or "none"; None: the embedded pair's draft with the embedded pair, else none.
    out             the run folder; None: runs/<recipe>.
    calib           text to calibrate and measure on, as calib.corpora.load takes it.
    samples         calibration windows of `seq_len` tokens.
    eval_tokens     tokens to measure quality on; 0: none is measured.
    choices         choices of the next line to measure quality on, one for eight of those tokens at most; 0: none.
    long_context    tokens of long contexts to measure quality on, at most what the models hold; 0: none.
    tasks           tasks of lm-eval to run on both models; task_folder: with the YAML files of one's own.
    new_tokens      tokens for each prompt that speed is measured on.
    prompts         a file of prompts to measure speed on, as runtime.bench.prompts reads it; None: of the text.
    drafter         the only drafter whose speed is measured, by its name; None: all that the run has.
    draft_length    tokens that every drafter proposes in a round; None: what pays, chosen every round.
    speed           False: no figure of the report is timed.
    baselines       how much of transformers' own `generate` is timed beside: a key of BASELINES.
    threads         of the CPU; None: torch's own number.
    shard_bytes     most bytes in one file of weights.
    memory_budget   bytes of memory that the work on the weights may take; None: what is free. Where activations do not
                    fit into it they stay in a file; the result is the same.
    minutes, tokens the budget of each stage that trains, in place of the recipe's; at most one of the two.
    export          forms to export the finished model to, besides the recipe's (compress.export).
    command         what the report shows to reproduce the run; None: the recipe alone.
    progress, note  are told how far each stage has come, and lines for people.

    Raises UserError for the first option that is out of its range.
    """

    recipe: "Recipe"
    model: str | None = None
    out: str | Path | None = None
    draft: str | None = None
    calib: str | None = None
    samples: int = _number(16, 1, 100_000)
    seq_len: int = _number(512, 8, 131_072)
    eval_tokens: int = _number(16_384, 0, 100_000_000)
    choices: int = _number(2000, 0, 1_000_000)
    long_context: int = _number(0, 0, 10_000_000)
    tasks: tuple[str, ...] = ()
    task_folder: str | None = None
    new_tokens: int = _number(64, 1, 100_000)
    prompts: str | None = None
    drafter: str | None = None
    draft_length: int | None = _number(None, 1, 64)
    device: str = "cpu"
    threads: int | None = _number(None, 1, 1024)
    seed: int = _number(0, 0, 2**63 - 1)
    resume: bool = False
    force: bool = False
    speed: bool = True
    baselines: str = "eager"
    shard_bytes: int = _number(SHARD_BYTES, 1, 2**62)
    memory_budget: int | None = _number(None, 1, 2**62)
    minutes: float | None = None
    tokens: int | None = _number(None, 1, 10**15)
    export: tuple[str, ...] = ()
    command: str | None = None
    progress: Progress = silent
    note: Note = unsaid

    @classmethod
    def of(cls, recipe: "Recipe", **options: Any) -> "RunContext":
        """A recipe with options by name; for those that are None the recipe's value holds, else the default."""
        from compress.recipe.training import Budget

        known = {one.name for one in fields(cls)} - {"recipe"}
        for name in options:
            if name not in known:
                raise UserError(f"option {name!r} is unknown: expected one of {', '.join(sorted(known))}")
        wished = recipe.calibration
        values: dict[str, Any] = {"calib": wished.source, "samples": wished.samples, "seq_len": wished.seq_len}
        values |= {name: value for name, value in options.items() if value is not None}
        context = cls(recipe, **{name: value for name, value in values.items() if value is not None})
        if context.minutes is None and context.tokens is None:
            return context
        return replace(context, recipe=recipe.with_budget(Budget(context.tokens, context.minutes)))

    def __post_init__(self) -> None:
        from compress.recipe.exports import check_exports
        from compress.recipe.training import LEAST_MINUTES, MOST_MINUTES
        from runtime.devices import resolve
        from runtime.errors import UserError as RuntimeFloorError
        from runtime.errors import meant

        for one in fields(self):
            value = getattr(self, one.name)
            if value is None or "range" not in one.metadata:
                continue
            least, most = one.metadata["range"]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                option = "--" + one.name.replace("_", "-")
                raise UserError(f"{option}: expected a whole number from {least} to {most}, found {value}: correct it")
        check_exports(self.export)
        if self.drafter is not None and self.drafter not in TIMED:
            hint = meant(self.drafter, TIMED, "correct it")
            raise UserError(f"--drafter: expected one of {', '.join(TIMED)}, found {self.drafter!r}: {hint}")
        if self.baselines not in BASELINES:
            raise UserError(f"--baselines: expected {', '.join(BASELINES)}, found {self.baselines!r}: correct it")
        if self.minutes is not None:
            if self.tokens is not None:
                raise UserError("--minutes and --tokens: expected one budget, found both: leave one out")
            if not LEAST_MINUTES <= self.minutes <= MOST_MINUTES:
                raise UserError(f"--minutes: expected {LEAST_MINUTES} or more, found {self.minutes}: correct it")
        try:
            resolve(self.device)
        except RuntimeFloorError as error:
            raise UserError(f"--device: {error}") from error

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.out if self.out is not None else f"runs/{self.recipe.name}")
