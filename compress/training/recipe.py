"""What a recipe may say about training: the key `training` of every stage that trains."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from compress.recipe_stages import Strict
from compress.training.settings import MOST_MINUTES, Budget, Settings

Share = Annotated[float, Field(ge=0, le=1, strict=False)]
Count = Annotated[StrictInt, Field(ge=1, le=1_000_000)]
Minutes = Annotated[float, Field(gt=0, le=MOST_MINUTES, strict=False)]
Tokens = Annotated[StrictInt, Field(ge=1, le=10**15)]


class Training(Strict):
    """How long a stage trains, on what, and how. A stage has a subclass of its own where its defaults differ.

    minutes, tokens  the budget: one of the two (training/settings.py says what they mean).
    source           text to train on (calib/training_text.py); default: the run's own, without what is measured on.
    The other keys are the loop's `Settings`.
    """

    default_minutes: ClassVar[float] = 20.0

    minutes: Minutes | None = None
    tokens: Tokens | None = None
    source: StrictStr | None = None
    rate: Annotated[float, Field(gt=0, le=10, strict=False)] = 5e-4
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: Share = 0.03
    decay: Share = 0.3
    floor: Share = 0.05
    weight_decay: Share = 0.0
    clip: Annotated[float, Field(gt=0, strict=False)] = 1.0
    batch: Count = 8
    accumulate: Count = 1
    length: Annotated[StrictInt, Field(ge=8, le=131_072)] = 256
    evaluate_every: Count = 100
    save_every: Count = 100
    autocast: StrictBool = False

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fills in the budget, so that the recipe that is kept says everything."""
        if isinstance(data, dict) and data.get("minutes") is None and data.get("tokens") is None:
            return {**data, "minutes": cls.default_minutes}
        return data

    @model_validator(mode="after")
    def _one_budget(self) -> "Training":
        if self.minutes is not None and self.tokens is not None:
            raise ValueError("minutes: expected a budget of either minutes or tokens, found both")
        return self

    def budget(self) -> Budget:
        """How long."""
        return Budget(self.tokens, self.minutes)

    def settings(self, seed: int) -> Settings:
        """How."""
        mine = self.model_dump(exclude={"minutes", "tokens", "source"})
        return Settings(seed=seed, **mine)

    def with_budget(self, budget: Budget) -> "Training":
        """The same with another budget."""
        return self.model_copy(update={"minutes": budget.minutes, "tokens": budget.tokens})


class Trained(Strict):
    """A stage that trains."""

    training: Training = Field(default_factory=Training)

    @model_validator(mode="before")
    @classmethod
    def _with_training(cls, data: Any) -> Any:
        """A stage without the key trains as long as its kind does by default."""
        return {**data, "training": {}} if isinstance(data, dict) and data.get("training") is None else data
