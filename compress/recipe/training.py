"""What a training run is told: how much it may take, and how it goes."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from compress.errors import UserError
from compress.recipe.block_stages import Strict

# No machine makes a step in less: said before the text is read, which takes minutes.
LEAST_MINUTES, MOST_MINUTES = 0.001, 1_000_000.0


@dataclass(frozen=True)
class Budget:
    """How long training goes on: exactly one of tokens and minutes.

    tokens       predicted tokens, over all processes.
    minutes      wall time on this machine. It becomes a number of steps once the first few have been timed, and that
                 number is kept in the checkpoint: a resumed run follows the same schedule, however fast it is then.
    most_tokens  with minutes: training ends there if the time does not end it before. At least a step is made.
    """

    tokens: int | None = None
    minutes: float | None = None
    most_tokens: int | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            found = "both" if self.tokens is not None else "none"
            raise UserError(f"training: expected a budget of either tokens or minutes, found {found}: name one")
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"training.tokens: expected at least 1, found {self.tokens}: raise it")
        if self.minutes is not None and not 0 < self.minutes <= MOST_MINUTES:
            raise UserError(f"training.minutes: expected more than 0, found {self.minutes}: correct it")
        if self.most_tokens is not None and (self.minutes is None or self.most_tokens < 1):
            raise ValueError(f"most_tokens: expected at least 1, with minutes, found {self.most_tokens}")


@dataclass(frozen=True)
class Settings:
    """How the loop trains; `Training` has the ranges.

    learning_rate   the optimiser's peak learning rate.
    schedule        cosine: down to the least rate from the warm-up on; wsd: warm-up, stable, decay (linear).
    warmup, decay   shares of the steps; decay is of wsd only.
    min_lr_ratio    the last step's rate, as a share of the peak.
    max_grad_norm   the largest norm of all gradients together; larger ones are scaled down to it.
    batch           windows in a micro-batch, over all processes together.
    gradient_accumulation_steps  micro-batches in a step.
    length          predicted tokens in a window, which has one token more.
    evaluate_every, save_every   steps.
    autocast        whether the loss is computed under bfloat16 autocast; weights and moments stay as they are.
    """

    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = 0.03
    decay: float = 0.3
    min_lr_ratio: float = 0.05
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    batch: int = 8
    gradient_accumulation_steps: int = 1
    length: int = 256
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 100
    autocast: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens in a step, over all processes."""
        return self.batch * self.gradient_accumulation_steps * self.length


Share = Annotated[float, Field(ge=0, le=1, strict=False)]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000)]
Minutes = Annotated[float, Field(ge=LEAST_MINUTES, le=MOST_MINUTES, strict=False)]
Tokens = Annotated[StrictInt, Field(ge=1, le=10**15)]


class Training(Strict):
    """How long a stage trains, on what, and how.

    minutes, tokens  the budget: one of the two (`Budget` says what they mean).
    source           text to train on (calib/training_text.py); default: the run's own, without what is measured on.
    autocast         auto: where the device has instructions that multiply bfloat16; in float32 elsewhere.
    The other keys are the loop's `Settings`.
    """

    minutes: Minutes | None = None
    tokens: Tokens | None = None
    source: StrictStr | None = None
    learning_rate: Annotated[float, Field(gt=0, le=10, strict=False)] = 5e-4
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: Share = 0.03
    decay: Share = 0.3
    min_lr_ratio: Share = 0.05
    weight_decay: Share = 0.0
    max_grad_norm: Annotated[float, Field(gt=0, strict=False)] = 1.0
    batch: Count = 8
    gradient_accumulation_steps: Count = 1
    length: Annotated[StrictInt, Field(ge=8, le=131_072)] = 256
    evaluate_every: Count = 100
    save_every: Count = 100
    autocast: StrictBool | Literal["auto"] = False

    @model_validator(mode="after")
    def _one_budget(self) -> "Training":
        if self.minutes is not None and self.tokens is not None:
            raise ValueError("minutes: expected a budget of either minutes or tokens, found both")
        return self

    def budget(self) -> Budget:
        return Budget(self.tokens, self.minutes)

    def settings(self, seed: int, bfloat16: bool = False) -> Settings:
        """The loop's; `bfloat16`: whether an `autocast` of auto is one (compress/training/precision.py)."""
        mine = self.model_dump(exclude={"minutes", "tokens", "source"})
        if self.autocast == "auto":
            mine["autocast"] = bfloat16
        return Settings(seed=seed, **mine)

    def with_budget(self, budget: Budget) -> "Training":
        """The same with another budget."""
        return self.model_copy(update={"minutes": budget.minutes, "tokens": budget.tokens})


class TrainingStage(Strict):
    """A stage that trains. `defaults`: keys of its training that are the stage's own where the recipe does not say."""

    defaults: ClassVar[dict[str, Any]] = {}

    training: Training

    @model_validator(mode="before")
    @classmethod
    def _with_training(cls, data: Any) -> Any:
        """Fills in the defaults, so that the recipe that is kept says everything."""
        asked = (data.get("training") or {}) if isinstance(data, dict) else None
        if not isinstance(asked, dict):
            return data
        filled = cls.defaults | asked
        if asked.get("minutes") is None:
            filled["minutes"] = cls.defaults["minutes"] if asked.get("tokens") is None else None
        return {**data, "training": filled}
