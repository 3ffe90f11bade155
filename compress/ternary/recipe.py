"""What the stages ternary and qat of a recipe may say."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from compress.distill.answers_recipe import AnswersKey
from compress.recipe_stages import Quantize, check_patterns
from compress.training.recipe import Trained, Training

if TYPE_CHECKING:
    from compress.distill.objective import Objective
    from compress.ternary.train import Manner

Weight = Annotated[float, Field(ge=0, strict=False)]


class RoundedTraining(Training):
    """Minutes are for the embedded pair on two cores."""

    default_minutes: ClassVar[float] = 60.0


class _Rounded(Trained, AnswersKey):
    """Keys that both stages have.

    targets, ignore  regular expressions over the names of the linear layers, as quantize has them.
    kl, cross_entropy, hidden, temperature  how much each loss counts (`compress.distill.objective.Objective`): to the
                     original's next-token distribution, on the text itself, to the original's hidden states.
    answers          keeps the original's answers to some windows on disk, and trains on these (`Answers`).
    optimizer        of the rounded matrices.
    rest             rate of everything else (embedding, norms), as a share of the training's; 0: it stays as it is.
    checkpointing    activations are computed twice instead of kept: slower, in less memory.
    """

    training: RoundedTraining = Field(default_factory=RoundedTraining)
    targets: tuple[StrictStr, ...] = Field(default=(".*",), min_length=1)
    ignore: tuple[StrictStr, ...] = ()
    kl: Weight = 1.0
    cross_entropy: Weight = 0.0
    hidden: Weight = 0.0
    temperature: Annotated[float, Field(gt=0, le=100, strict=False)] = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    rest: Annotated[float, Field(ge=0, le=10, strict=False)] = 1.0
    checkpointing: StrictBool = False

    @field_validator("targets", "ignore")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(patterns)

    @model_validator(mode="after")
    def _some(self) -> "_Rounded":
        if not (self.kl or self.cross_entropy or self.hidden):
            raise ValueError("kl: expected a weight above 0 for one of kl, cross_entropy, hidden, found none")
        return self

    def objective(self) -> "Objective":
        """What the model learns from."""
        from compress.distill.objective import Objective  # torch, which reading a recipe does not need

        return Objective(self.kl, self.cross_entropy, self.hidden, self.temperature)


class Ternary(_Rounded):
    """A stage that trains the blocks' linear layers as BitNet has them, and stores them in two bits a weight.

    weights  ternary: −1, 0 and 1 (BitNet b1.58); binary: −1 and 1 (BitNet), which the file does not store smaller.
    ramp     share of the training over which rounding sets in; 0: all of it from the first step.
    """

    weights: Literal["ternary", "binary"] = "ternary"
    ramp: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0

    def quantize(self) -> Quantize:
        """The quantise stage that rounds the same layers without training: what the plan is made from."""
        return Quantize(scheme="ternary", targets=self.targets, ignore=self.ignore)

    def manner(self) -> "Manner":
        """How the weights are trained."""
        from compress.ternary.train import Manner

        return Manner(self.ramp, self.optimizer, self.rest, self.checkpointing)


class Qat(_Rounded):
    """A stage that trains the blocks' linear layers as they will be stored quantised.

    scheme       int8-dynamic (a scale per output channel), int4, int3 or int2 (a scale per group).
    group_size   as quantize has it.
    symmetric    int4, int3, int2: whether groups have no zero point.
    int8_inputs  whether inputs are rounded in training too, as the kernels do when they run the model.
    """

    scheme: Literal["int8-dynamic", "int4", "int3", "int2"]
    group_size: StrictInt | None = None
    symmetric: StrictBool | None = None
    int8_inputs: StrictBool = True

    @model_validator(mode="after")
    def _fit(self) -> "Qat":
        self.quantize()
        return self

    def quantize(self) -> Quantize:
        """The quantise stage that rounds the same layers without training: what the plan is made from."""
        keys: dict[str, Any] = {"scheme": self.scheme, "group_size": self.group_size, "symmetric": self.symmetric}
        return Quantize.model_validate({**keys, "targets": self.targets, "ignore": self.ignore})

    def manner(self) -> "Manner":
        """How the weights are trained."""
        from compress.ternary.train import Manner

        return Manner(0.0, self.optimizer, self.rest, self.checkpointing)
