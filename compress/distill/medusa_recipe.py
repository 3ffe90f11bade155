"""What the stage medusa of a recipe may say."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from compress.recipe_stages import Strict
from compress.training.recipe import Count, Trained, Training

OpenShare = Annotated[float, Field(gt=0, lt=1, strict=False)]


class Joint(Strict):
    """How medusa-2 trains heads and model together.

    warmup       the share of the budget in which the heads are trained alone.
    weight       λ: how much the heads' loss counts beside the model's own.
    rate_factor  the model's learning rate as a share of the training's, which is for the heads' matrices.
    heads_factor the heads' rate beside the model, likewise: at the full rate they forget what the warm-up taught them.
    """

    warmup: OpenShare = 0.5
    weight: Annotated[float, Field(gt=0, le=10, strict=False)] = 0.2
    rate_factor: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.03
    heads_factor: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.3


class MedusaTraining(Training):
    """bfloat16 is three times as quick."""

    default_minutes: ClassVar[float] = 30.0

    # On the embedded pair, 4,096 windows three times: held-out loss 3.58, and 3.77 at three times the rate.
    rate: Annotated[float, Field(gt=0, le=10, strict=False)] = 1e-3
    batch: Count = 4
    length: Annotated[StrictInt, Field(ge=8, le=131_072)] = 192
    evaluate_every: Count = 250
    save_every: Count = 500
    autocast: StrictBool = True


class Medusa(Trained):
    """A stage that trains Medusa heads (Cai et al. 2024, 2401.10774) beside the compressed model.

    kind           medusa-1: the model stays as it is; medusa-2: heads and model are trained together, and the model is
                   compressed again.
    heads, layers  how many heads, and residual blocks of each.
    projection     shared: the model's own output projection follows the blocks and one square matrix of each head; own:
                   every head has an output projection, which costs a round as much as the model's, once per head.
    nodes          of the tree that the heads draft.
    continuations  what follows a prompt in the text to train on: what the compressed model writes by itself, the most
                   probable token each time (greedy) or drawn (sampled); none: the text as it stands.
    prompt         share of each window that is text in any case.
    samples        the most windows of such text; they are made once, with the model's hidden states, in a quarter of
                   the time at most.
    passes         of a budget in minutes: how often each window is learned from at most.
    decay          head k's loss counts decay to the power k.
    optimizer      of the matrices within the heads.
    joint          of medusa-2 only.
    """

    training: MedusaTraining = Field(default_factory=MedusaTraining)
    kind: Literal["medusa-1", "medusa-2"] = "medusa-1"
    heads: Annotated[StrictInt, Field(ge=1, le=8)] = 4
    layers: Annotated[StrictInt, Field(ge=1, le=4)] = 1
    projection: Literal["shared", "own"] = "shared"
    nodes: Annotated[StrictInt, Field(ge=1, le=64)] = 24
    continuations: Literal["greedy", "sampled", "none"] = "greedy"
    prompt: OpenShare = 0.25
    samples: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 4096
    # On the embedded pair, 4,096 windows at a rate of 3e-3: held-out loss 3.77 after 3 passes, 4.13 after 6.5 and 5.23
    # after 17, the rate falling to its floor in each.
    passes: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 3
    decay: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.8
    optimizer: Literal["adamw", "muon"] = "adamw"
    joint: Joint | None = None

    @model_validator(mode="after")
    def _fit(self) -> "Medusa":
        if self.joint is not None and self.kind != "medusa-2":
            raise ValueError(f"joint: expected with kind medusa-2 only, found kind {self.kind}")
        return self
