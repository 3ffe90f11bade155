"""What a recipe may say about keeping a teacher's answers."""

from typing import Annotated

from pydantic import Field, StrictInt, model_validator

from compress.recipe_stages import Strict


class Answers(Strict):
    """The teacher is asked once, before training, and is then no longer held in memory.

    windows  of the training text, which are trained on over and over.
    top      most probable tokens that are kept at each of their positions, in 8 bytes each; what probability the others
             have together is kept, too.
    """

    windows: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 2048
    top: Annotated[StrictInt, Field(ge=1, le=100_000)] = 32


class AnswersKey(Strict):
    """The key `answers` of a stage with a teacher; without it the teacher is run beside the student."""

    answers: Answers | None = None

    @model_validator(mode="after")
    def _answers_are_logits(self) -> "AnswersKey":
        if self.answers is None:
            return self
        hidden, temperature, kl = (getattr(self, name) for name in ("hidden", "temperature", "kl"))
        if hidden or temperature != 1 or not kl:
            raise ValueError(
                "answers: expected kl above 0, hidden 0 and temperature 1, which is all that kept answers are good "
                f"for, found kl {kl}, hidden {hidden}, temperature {temperature}"
            )
        return self
