"""What the stages of a recipe that train may say: draft, heal, learn, medusa, ternary, qat."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from compress.recipe.block_stages import Quantize, Strict, check_patterns
from compress.recipe.training import Share, TrainingStage

RateShare = Annotated[float, Field(ge=0, le=100, strict=False)]
OpenShare = Annotated[float, Field(gt=0, lt=1, strict=False)]
Temperature = Annotated[float, Field(gt=0, le=100, strict=False)]


class Draft(TrainingStage):
    """A stage that aligns the draft with its compressed target, by distillation on the texts that both write.

    loss           divergence from the target's next-token distribution; minillm: the policy gradient of the reverse KL
                   of whole texts, on the student's batches (reverse_kl on the others).
    beta           jsd: its β.
    temperature    of both softmaxes.
    cross_entropy  weight of the text itself, beside the divergence.
    on_policy_fraction  share of the batches that the draft writes itself at temperature 1 (GKD's λ).
    teacher        share of the batches that the target has written, half of it greedily, half at temperature 1.
    samples        texts that the target writes for that, once, of the training's length; fewer where they would take
                   more than a fifth of the minutes.
    prompt         tokens of training text that such texts begin with.
    teacher_mix    minillm: share of the target in the distribution that its texts are drawn from.
    optimizer      of the blocks' matrices.
    keep           share of the target's blocks that a draft is made of where the run has none; one at least.
    blocks         which ones: influence, those that change their input most; even, evenly spaced ones.
    """

    # Minutes are what the embedded pair's draft takes on two cores, its teacher's samples included. On that pair with a
    # ternary target half of the rate was 0.003 of agreement behind after two million tokens, two and a half times it
    # 0.02 of acceptance after half a million.
    defaults: ClassVar[dict[str, Any]] = {"minutes": 15.0, "learning_rate": 2e-3, "autocast": "auto"}

    loss: Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "minillm"] = "forward_kl"
    beta: OpenShare = 0.5
    temperature: Temperature = 1.0
    cross_entropy: Annotated[float, Field(ge=0, strict=False)] = 0.0
    # On the embedded pair with its int4 target, after 300,000 tokens: a quarter of the draft's own text was 0.002 of
    # agreement behind training text alone, half of the target's 0.006. Both cost time to write besides.
    on_policy_fraction: Share = 0.1
    teacher: Share = 0.0
    samples: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 1024
    prompt: Annotated[StrictInt, Field(ge=1, le=65_536)] = 64
    teacher_mix: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.2
    optimizer: Literal["adamw", "muon"] = "muon"
    keep: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.25
    blocks: Literal["influence", "even"] = "influence"

    @model_validator(mode="after")
    def _fit(self) -> "Draft":
        if self.on_policy_fraction + self.teacher > 1:
            raise ValueError(
                f"on_policy_fraction: expected shares of on_policy_fraction and teacher that sum to 1 at most, found "
                f"{self.on_policy_fraction} and {self.teacher}"
            )
        if self.loss == "minillm" and not self.on_policy_fraction:
            raise ValueError(
                "on_policy_fraction: expected a share above 0 with loss minillm, which learns on them, found 0"
            )
        if self.loss == "minillm" and self.temperature != 1:
            raise ValueError(f"temperature: expected 1 with loss minillm, found {self.temperature}")
        if self.prompt >= self.training.length:
            raise ValueError(
                f"prompt: expected fewer tokens than training.length ({self.training.length}), found {self.prompt}"
            )
        return self


Weight = Annotated[float, Field(ge=0, strict=False)]


class LossWeights(Strict):
    """How much each loss counts; one that is not named counts nothing.

    forward_kl, reverse_kl, jsd, total_variation
                   divergences of the next-token distribution from the original's (compress/distill/divergences.py).
    hidden_states  squared distance to the original's hidden states over their mean square: after every block, or after
                   the last one where blocks are gone.
    attention      KL to the original's attention in the last block (MiniLM).
    relations      distances and angles between the last hidden states of some tokens (RKD).
    gradients      squared distance, like that of hidden states, to the gradient of the text's log-probability by the
                   embedded text (Sobolev training); costs twice the time.
    cross_entropy  on the text itself: continued pretraining.
    """

    forward_kl: Weight = 0.0
    reverse_kl: Weight = 0.0
    jsd: Weight = 0.0
    total_variation: Weight = 0.0
    hidden_states: Weight = 0.0
    attention: Weight = 0.0
    relations: Weight = 0.0
    gradients: Weight = 0.0
    cross_entropy: Weight = 0.0

    @model_validator(mode="after")
    def _some(self) -> "LossWeights":
        if not self.weights():
            raise ValueError(f"expected a weight above 0 for one of {', '.join(type(self).model_fields)}, found none")
        return self

    def weights(self) -> dict[str, float]:
        """The losses that count."""
        return {name: weight for name, weight in self.model_dump().items() if weight}


class Answers(Strict):
    """The teacher is asked once, before training, and is then no longer held in memory.

    windows  of the training text, which are trained on over and over.
    top      most probable tokens that are kept at each of their positions, in 8 bytes each; what probability the others
             have together is kept, too.
    """

    windows: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 2048
    top: Annotated[StrictInt, Field(ge=1, le=100_000)] = 32


class DistillationStage(TrainingStage):
    """Keys of the stages that learn from the original.

    loss         how much each loss counts (`LossWeights`).
    temperature  of both softmaxes of the divergences.
    beta         jsd: its β.
    answers      keeps the original's answers to some windows on disk, and trains on these (`Answers`); without it the
                 original is run beside the student.
    optimizer    of the blocks' matrices.
    """

    loss: LossWeights = LossWeights(forward_kl=1.0)
    temperature: Temperature = 1.0
    beta: OpenShare = 0.5
    answers: Answers | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"

    @model_validator(mode="after")
    def _answers_are_logits(self) -> "DistillationStage":
        weights = self.loss.weights()
        inside = [name for name in ("hidden_states", "attention", "relations", "gradients") if name in weights]
        if self.answers is not None and (inside or self.temperature != 1 or weights.keys() == {"cross_entropy"}):
            raise ValueError(
                "answers: expected a divergence among the losses, none of what is inside of the original, and "
                "temperature 1, which is all that kept answers are good for, found losses "
                f"{', '.join(weights)} and temperature {self.temperature}"
            )
        return self


class Heal(DistillationStage):
    """A stage that teaches a pruned model to answer like the original again, by distillation.

    optimizer  muon needs matrices of which no single weights were pruned.
    """

    # On the embedded pair and two cores. bfloat16 takes a third of float32's time where the CPU has it.
    defaults: ClassVar[dict[str, Any]] = {"minutes": 20.0, "autocast": "auto"}


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


class Medusa(TrainingStage):
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
    as_is          share of the windows that stay text as it stands.
    samples        the most windows of such text; they are made once, with the model's hidden states, in a quarter of
                   the time at most.
    max_epochs     of a budget in minutes: how often each window is learned from at most.
    decay          head k's loss counts decay to the power k.
    optimizer      of the matrices within the heads.
    joint          of medusa-2 only.
    """

    # bfloat16 is three times as quick. The rate on the embedded pair, 4,096 windows three times: held-out loss 3.58,
    # and 3.77 at three times the rate.
    defaults: ClassVar[dict[str, Any]] = {
        "minutes": 30.0,
        "learning_rate": 1e-3,
        "batch": 4,
        "length": 192,
        "evaluate_every": 250,
        "save_every": 500,
        "autocast": "auto",
    }

    kind: Literal["medusa-1", "medusa-2"] = "medusa-1"
    heads: Annotated[StrictInt, Field(ge=1, le=8)] = 4
    layers: Annotated[StrictInt, Field(ge=1, le=4)] = 1
    projection: Literal["shared", "own"] = "shared"
    nodes: Annotated[StrictInt, Field(ge=1, le=64)] = 24
    continuations: Literal["greedy", "sampled", "none"] = "greedy"
    prompt: OpenShare = 0.25
    as_is: Share = 0.0
    samples: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 4096
    # On the embedded pair, 4,096 windows at a rate of 3e-3: held-out loss 3.77 after 3 epochs, 4.13 after 6.5 and 5.23
    # after 17, the rate falling to its floor in each.
    max_epochs: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 3
    decay: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.8
    optimizer: Literal["adamw", "muon"] = "adamw"
    joint: Joint | None = None

    @model_validator(mode="after")
    def _fit(self) -> "Medusa":
        if self.joint is not None and self.kind != "medusa-2":
            raise ValueError(f"joint: expected with kind medusa-2 only, found kind {self.kind}")
        return self


class Learn(TrainingStage):
    """A stage that trains what a quantised model is made of, codes included, to answer like the original.

    It needs text and a few minutes, and changes neither format nor bytes. Windows that nothing else reads choose what
    is kept; where no candidate is better there, the model stays as it was.

    loss      how much each loss counts (`LossWeights`).
    rounding  whether codes move too (not those of a trellis, whose levels are trained instead).
    reach     codes up and down that one may move.
    codes, norms, levels  rates as shares of the training's, which is the relative change of scales in a step: codes'
              in units of the scale, levels' as a share of the largest level; 0: they stay as they are.
    gradient_checkpointing  activations are computed twice instead of kept: slower, in less memory.
    """

    defaults: ClassVar[dict[str, Any]] = {"minutes": 20.0, "learning_rate": 2e-3, "autocast": "auto"}

    loss: LossWeights = LossWeights(forward_kl=1.0)
    rounding: StrictBool = True
    reach: Annotated[StrictInt, Field(ge=1, le=15)] = 1
    codes: RateShare = 1.0
    norms: RateShare = 0.5
    levels: RateShare = 1.0
    gradient_checkpointing: StrictBool = False


class RoundedStage(DistillationStage):
    """Keys of both stages that train what is stored rounded.

    targets, ignore  regular expressions over the names of the linear layers, as quantize has them.
    optimizer        of the rounded matrices.
    rest             rate of everything else (embedding, norms), as a share of the training's; 0: it stays as it is.
    norms            that of norms and biases, few and large numbers that a matrix's rate hardly moves; default: rest's.
    gradient_checkpointing  activations are computed twice instead of kept: slower, in less memory.
    """

    defaults: ClassVar[dict[str, Any]] = {"minutes": 60.0}  # on the embedded pair and two cores

    targets: tuple[StrictStr, ...] = Field(default=(".*",), min_length=1)
    ignore: tuple[StrictStr, ...] = ()
    rest: Annotated[float, Field(ge=0, le=10, strict=False)] = 1.0
    norms: RateShare | None = None
    gradient_checkpointing: StrictBool = False

    @field_validator("targets", "ignore")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(patterns)


class Ternary(RoundedStage):
    """A stage that trains the blocks' linear layers as BitNet has them, and stores them in two bits a weight, or 1.25.

    weights  ternary: −1, 0 and 1 (BitNet b1.58); ternary-1.25: likewise, of every four inputs exactly one 0, in five
             bits for four weights and with a scale per output; binary: −1 and 1 (BitNet), which the file does not store
             smaller than ternary.
    ramp     share of the training over which rounding sets in; 0: all of it from the first step.
    fit_windows  of the training text, by which codes are fitted before training, layer by layer, so that they make up
             for one another's errors; 0: training starts from weights that are rounded to nearest.
    scales   ternary-1.25: rate of the outputs' scales, as a share of the training's, which is the relative change in a
             step; 0: they are what the weights give, and no more.
    """

    weights: Literal["ternary", "ternary-1.25", "binary"] = "ternary"
    ramp: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    fit_windows: Annotated[StrictInt, Field(ge=0, le=100_000)] = 0
    scales: RateShare = 0.0

    @model_validator(mode="after")
    def _fit(self) -> "Ternary":
        if self.fit_windows and self.weights == "binary":
            raise ValueError("fit_windows: expected 0 with binary weights, whose codes are not fitted, found more")
        if self.scales and self.weights != "ternary-1.25":
            raise ValueError(
                f"scales: expected 0 with {self.weights} weights, which have one scale a layer, found more"
            )
        return self

    def quantize(self) -> Quantize:
        """The quantise stage that rounds the same layers without training: what the plan is made from."""
        scheme = "ternary-1.25" if self.weights == "ternary-1.25" else "ternary"
        return Quantize(scheme=scheme, targets=self.targets, ignore=self.ignore)


class Qat(RoundedStage):
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
