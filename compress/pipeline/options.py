"""What a run is asked for besides the model and the recipe, and the check of every number."""

from dataclasses import dataclass

from compress.artifact import safetensors
from compress.errors import UserError
from compress.export import check_names
from compress.recipe.training import MOST_MINUTES
from runtime.devices import resolve
from runtime.errors import UserError as RuntimeFloorError


@dataclass(frozen=True)
class Options:
    """Everything about a run that is not the model or the recipe. None: the recipe's value, else the report's default.

    eval_tokens    0: no quality is measured.
    speed          False: no figure of the report is timed.
    shard_bytes    most bytes in one file of weights.
    memory_budget  bytes of memory that the work on the weights may take; None: what is free. Where activations do not
                   fit into it they stay in a file; the result is the same.
    export         forms to export the finished model to, besides the recipe's (compress.export).
    minutes, tokens  the budget of each stage that trains, in place of the recipe's; at most one of the two.
    """

    draft: str | None = None
    calib: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    eval_tokens: int = 16_384
    new_tokens: int = 64
    draft_length: int = 4
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    resume: bool = False
    force: bool = False
    speed: bool = True
    shard_bytes: int = safetensors.SHARD_BYTES
    memory_budget: int | None = None
    minutes: float | None = None
    tokens: int | None = None
    export: tuple[str, ...] = ()


# option: (least, most)
RANGES: dict[str, tuple[int, int]] = {
    "samples": (1, 100_000),
    "seq_len": (8, 131_072),
    "eval_tokens": (0, 100_000_000),
    "new_tokens": (1, 100_000),
    "draft_length": (1, 64),
    "threads": (1, 1024),
    "seed": (0, 2**63 - 1),
    "shard_bytes": (1, 2**62),
    "memory_budget": (1, 2**62),
    "tokens": (1, 10**15),
}


def check_ranges(options: Options) -> None:
    """Raises UserError naming the first number that is out of its range."""
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: expected a whole number from {least} to {most}, found {value}: correct it")
    if options.export:
        check_names(options.export)
    if options.minutes is not None:
        if options.tokens is not None:
            raise UserError("--minutes and --tokens: expected one budget, found both: leave one out")
        if not 0 < options.minutes <= MOST_MINUTES:
            raise UserError(f"--minutes: expected a number above 0, found {options.minutes}: correct it")
    try:
        resolve(options.device)
    except RuntimeFloorError as error:
        raise UserError(f"--device: {error}") from error
