"""What the stage heal of a recipe may say."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, model_validator

from compress.distill.answers_recipe import AnswersKey
from compress.distill.objective import Objective
from compress.training.recipe import Trained, Training

Weight = Annotated[float, Field(ge=0, strict=False)]


class HealTraining(Training):
    """Minutes are for the embedded pair on two cores. bfloat16 takes a third of float32's time where the CPU has it."""

    default_minutes: ClassVar[float] = 20.0

    autocast: StrictBool = True


class Heal(Trained, AnswersKey):
    """A stage that teaches a pruned model to answer like the original again, by distillation.

    kl             weight of the forward KL to the original's next-token distribution, at `temperature`.
    cross_entropy  weight of the text itself.
    hidden         weight of the squared distance to the original's hidden states over their mean square: after every
                   block, or after the last one where blocks are gone.
    answers        keeps the original's answers to some windows on disk, and trains on these (`Answers`).
    optimizer      of the blocks' matrices; muon needs matrices of which no single weights were pruned.
    """

    training: HealTraining = Field(default_factory=HealTraining)
    kl: Weight = 1.0
    cross_entropy: Weight = 0.0
    hidden: Weight = 0.0
    temperature: Annotated[float, Field(gt=0, le=100, strict=False)] = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"

    @model_validator(mode="after")
    def _some(self) -> "Heal":
        self.objective()
        return self

    def objective(self) -> Objective:
        """The same for the task."""
        return Objective(self.kl, self.cross_entropy, self.hidden, self.temperature)
