"""What a check finds, as data: findings by severity, one row for each weight, and the whole result."""

from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Level = Literal["broken", "suspicious", "note"]
"""broken: the model computes something else than it should, or is not loaded; suspicious: look at it; note: to know."""

Kind = Literal[
    "file",
    "missing",
    "extra",
    "shape",
    "finite",
    "constant",
    "swapped",
    "tied",
    "codes",
    "scales",
    "zero points",
    "order",
    "error",
    "experts",
    "config",
    "quantization",
    "tokenizer",
    "template",
    "draft heads",
    "trained",
    "unread",
    "depth",
]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Finding(_Plain):
    """One thing that was found.

    kind   what it is about; where: the tensor, layer, file or key; says: one sentence without the place.
    """

    level: Level
    kind: Kind
    where: str
    says: str

    @property
    def sentence(self) -> str:
        """For people."""
        return f"{self.where}: {self.says}"


class Weight(_Plain):
    """One weight of the checked model.

    name      the tensor as a plain checkpoint calls it; kind: the last part of its layer's name ("q_proj").
    stored    in words ("int4 in groups of 128"); bits: stored bits a weight, scales included.
    zeros     share of weights that are exactly 0.
    error     relative Frobenius error against the original; None: there is no original to compare with.
    nearest   what rounding the original to nearest in the same format gives; None: plain weights, or not known.
    cosine    between the two weights as vectors.
    scaled    whether rows or columns were scaled before they were compared (AWQ, SmoothQuant).
    """

    name: str
    kind: str
    stored: str
    packed: bool
    shape: tuple[int, ...]
    bits: float
    zeros: float
    error: float | None = None
    nearest: float | None = None
    cosine: float | None = None
    scaled: bool = False

    @property
    def factor(self) -> float | None:
        """How many times the error of rounding to nearest."""
        return self.error / self.nearest if self.error is not None and self.nearest else None


class Coverage(_Plain):
    """The weights of one kind of layer that are stored in one way. bits: stored bits a weight, on average."""

    kind: str
    stored: str
    tensors: int
    weights: int
    bits: float


class Depth(_Plain):
    """The model on a text, block after block, beside the original.

    inherited  after each block, relative error of the hidden states, each model on its own.
    own        relative error that the block alone makes, given the original's hidden states.
    """

    text: str
    tokens: int
    inherited: list[float]
    own: list[float]
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    flips: int | None = None


class Engine(_Plain):
    """Whether an engine loads the folder, by what its files say; asked: by the engine itself, which is installed."""

    name: str
    loads: bool | None
    why: str
    asked: bool = False


class Result(_Plain):
    """All of a check; `verdict` is one line.

    schema_version  goes up when a key changes its meaning.
    """

    schema_version: int = 1
    folder: str
    original: str | None
    form: str
    verdict: str
    level: Literal["good", "suspicious", "broken"]
    findings: list[Finding] = Field(default_factory=list)
    coverage: list[Coverage] = Field(default_factory=list)
    weights: list[Weight] = Field(default_factory=list)
    engines: list[Engine] = Field(default_factory=list)
    depth: Depth | None = None
    seconds: float = 0.0


_ORDER: tuple[Level, ...] = ("broken", "suspicious", "note")


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, each once, otherwise in the order given."""
    return sorted(dict.fromkeys(findings), key=lambda finding: _ORDER.index(finding.level))


def judge(findings: Iterable[Finding]) -> tuple[Literal["good", "suspicious", "broken"], str]:
    """The verdict's level and its line."""
    found = sort(findings)
    alarms = [finding for finding in found if finding.level != "note"]
    if not alarms:
        said = [finding.says for finding in found if finding.kind in ("trained", "unread")]
        return "good", "; ".join(["good", *said])
    first = alarms[0]
    more = len(alarms) - 1
    rest = f"; and {more} more finding{'s' if more > 1 else ''}" if more else ""
    return ("broken" if first.level == "broken" else "suspicious"), f"{first.level}: {first.sentence}{rest}"
