"""What the stage `block_draft` of a recipe may say."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictInt, model_validator

from compress.recipe.block_stages import SchemeName
from compress.recipe.training import Share, TrainingStage
from compress.recipe.training_stages import OpenShare

Size = Annotated[StrictInt, Field(ge=1, le=1_000_000)]


class BlockDraft(TrainingStage):
    """A stage that trains a small network which drafts all tokens of a round at once, on the compressed model's own
    hidden states (DFlash, 2602.06036; DSpark, 2607.05147).

    taps           behind how many of the model's layers it reads, one after the other; by default half of them, all but
                   the last, and all.
    draft_length   tokens on a path of its drafts, at most.
    layers         of the network, of the model's own sizes but for `intermediate_size` (default: the model's).
                   The first one begins as the model's last, where that is built alike, on the nearest rows to what
                   that reads.
    window         tokens of text that it sees.
    rank           numbers that are remembered along the drafted tokens.
    scheme         how its matrices are held when it runs.
    head           how a copy of the model's output projection is held, which a draft reads whole; "": there is no copy,
                   and it reads the model's own.
    frequent       share of the text's tokens that this copy has rows for, the most frequent ones; where a draft is
                   unsure of its first token the model's own output projection is asked. By default 0.99 where the
                   vocabulary has 16,384 tokens or more, else 1: all of them.
    anchors        drafts that each window is learned from at a time, at random, rather where the model was unsure.
    continuations  what follows a prompt in the text to train on: what the compressed model writes by itself, the most
                   probable token each time (greedy) or drawn (sampled); none: the text as it stands.
    prompt         share of each window that is text in any case, or several, by turns: texts that are drafted for have
                   prompts of all lengths, and a drafter is right least often soon behind them.
    as_is          share of the windows that stay text as it stands: what one model writes is little and alike, and is
                   learned by heart.
    samples        the most windows of such text; they are made once, with the model's hidden states, in a quarter of
                   the time at most.
    max_epochs     of a budget in minutes: how often each window is learned from at most.
    decay          place k's loss counts decay to the power k.
    distill        share of the loss that is the divergence from the model's distribution, beside the cross entropy of
                   its most probable token.
    optimizer      of the matrices that begin at random; the others are trained by AdamW, at a quarter of the rate.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "minutes": 40.0,
        "learning_rate": 2e-3,
        "batch": 8,
        "length": 192,
        "evaluate_every": 250,
        "save_every": 250,
        "autocast": "auto",
    }

    taps: tuple[Annotated[StrictInt, Field(ge=0)], ...] | None = None
    draft_length: Annotated[StrictInt, Field(ge=1, le=16)] = 6
    layers: Annotated[StrictInt, Field(ge=1, le=3)] = 1
    intermediate_size: Size | None = None
    window: Size = 128
    rank: Size = 256
    scheme: SchemeName | Literal[""] = "int8-dynamic"
    head: SchemeName | Literal[""] = "int8-dynamic"
    frequent: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    anchors: Annotated[StrictInt, Field(ge=1, le=4096)] = 16
    continuations: Literal["greedy", "sampled", "none"] = "greedy"
    prompt: OpenShare | Annotated[tuple[OpenShare, ...], Field(min_length=1)] = (0.1, 0.2, 0.35, 0.5, 0.65)
    as_is: Share = 0.2
    samples: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 12_288
    max_epochs: Annotated[StrictInt, Field(ge=1, le=1_000_000)] = 30
    decay: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.8
    distill: Share = 0.5
    optimizer: Literal["adamw", "muon"] = "adamw"

    @model_validator(mode="after")
    def _fit(self) -> "BlockDraft":
        if "int8-static" in (self.scheme, self.head):
            raise ValueError("scheme, head: expected those whose inputs need no calibration, found int8-static")
        if self.taps is not None and (not self.taps or len(set(self.taps)) < len(self.taps)):
            raise ValueError(f"taps: expected different numbers of layers, found {list(self.taps)}")
        return self
