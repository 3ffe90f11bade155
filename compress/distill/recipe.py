"""What the stage draft of a recipe may say."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, model_validator

from compress.training.recipe import Trained, Training

if TYPE_CHECKING:
    from compress.distill.policy import Shares

Share = Annotated[float, Field(ge=0, le=1, strict=False)]


class DraftTraining(Training):
    """Minutes are what the embedded pair's draft takes on two cores, its teacher's samples included."""

    default_minutes: ClassVar[float] = 15.0

    # On the embedded pair with its ternary target: half of it was 0.003 of agreement behind after two million tokens,
    # two and a half times it 0.02 of acceptance after half a million.
    rate: Annotated[float, Field(gt=0, le=10, strict=False)] = 2e-3
    batch: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 8
    autocast: StrictBool = True


class Draft(Trained):
    """A stage that aligns the draft with its compressed target, by distillation on the texts that both write.

    loss           divergence of the draft's next-token distribution from the target's; minillm: the policy gradient of
                   the reverse KL of whole texts, on the student's batches (reverse_kl on the others).
    beta           jsd: its β.
    temperature    of both softmaxes.
    cross_entropy  weight of the text itself, beside the divergence.
    student        share of the batches that the draft writes itself at temperature 1 (GKD's λ).
    teacher        share of the batches that the target has written, half of it greedily, half at temperature 1.
    samples        texts that the target writes for that, once, of the training's length; fewer where they would take
                   more than a fifth of the minutes.
    prompt         tokens of training text that such texts begin with.
    teacher_mix    minillm: share of the target in the distribution that its texts are drawn from.
    optimizer      of the blocks' matrices.
    keep           share of the target's blocks that a draft is made of where the run has none; one at least.
    blocks         which ones: influence, those that change their input most; even, evenly spaced ones.
    """

    training: DraftTraining = Field(default_factory=DraftTraining)
    loss: Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "minillm"] = "forward_kl"
    beta: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.5
    temperature: Annotated[float, Field(gt=0, le=100, strict=False)] = 1.0
    cross_entropy: Annotated[float, Field(ge=0, strict=False)] = 0.0
    # On the embedded pair with its int4 target, after 300,000 tokens: a quarter of the draft's own text was 0.002 of
    # agreement behind training text alone, half of the target's 0.006. Both cost time to write besides.
    student: Share = 0.1
    teacher: Share = 0.0
    samples: Annotated[StrictInt, Field(ge=1, le=10_000_000)] = 1024
    prompt: Annotated[StrictInt, Field(ge=1, le=65_536)] = 64
    teacher_mix: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.2
    optimizer: Literal["adamw", "muon"] = "muon"
    keep: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.25
    blocks: Literal["influence", "even"] = "influence"

    @model_validator(mode="after")
    def _fit(self) -> "Draft":
        if self.student + self.teacher > 1:
            raise ValueError(
                f"student: expected shares of student and teacher that sum to 1 at most, found {self.student} and "
                f"{self.teacher}"
            )
        if self.loss == "minillm" and not self.student:
            raise ValueError("student: expected a share above 0 with loss minillm, which learns on them, found 0")
        if self.loss == "minillm" and self.temperature != 1:
            raise ValueError(f"temperature: expected 1 with loss minillm, found {self.temperature}")
        if self.prompt >= self.training.length:
            raise ValueError(
                f"prompt: expected fewer tokens than training.length ({self.training.length}), found {self.prompt}"
            )
        return self

    @property
    def shares(self) -> "Shares":
        """Who writes which share of the batches."""
        # torch, which a command that only shows its recipes should not pay for.
        from compress.distill.policy import Shares

        return Shares(self.student, self.teacher)
