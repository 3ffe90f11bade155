"""The form of report.json: what measures returns these objects, and what shows them reads their attributes.

The convention for what was not measured: the key stays, its value is null, and the top-level `not_measured` maps the
figure's dotted path to the reason (not_measured.py). No null is without a reason, and no number is a guess.

Of schema 2 are speed.pairings, speed.fastest_drafter and speed.mean_draft_length, and asked.drafter; speed.drafter is
who was fastest, plain decoding ("none") included. What schema 1 had is still there, of the fastest drafter.

Of schema 3 are the rest of quality.kl_divergence, and quality.token_statistics, quality.flips, quality.verdict,
quality.tasks, quality.long_context (null: not asked for), and certificate. Reports of schema 2 are read as well.

Units: bytes, milliseconds, tokens per second, joules; shares and ratios are plain numbers.
"""

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.export import Loss
from compress.quality.figures import Divergence, Flips, LongContext, TaskFigures, TokenStatistics, Verdict
from compress.records import ExpertRecord, LeftAlone, Strict
from compress.report.not_measured import reason_for, unexplained
from compress.report.schema_speed import Lossless, LosslessClass, Speed
from runtime.audit.certificate import Certificate

SCHEMA: Final = 3


class Machine(Strict):
    """Where it ran. `instruction_path` is the compressed model's kernels: a name of runtime.kernels.available(), and
    behind it the libraries that run some of the layers."""

    cpu: str
    cores: int
    instruction_path: str
    device: str


class Asked(Strict):
    """What the user asked for: the command without directories, the complete recipe, how to measure.

    drafter, draft_length  null: all drafters that there were, and γ chosen every round.
    """

    command: str
    recipe: dict[str, Any]
    samples: int
    seq_len: int
    eval_tokens: int
    new_tokens: int
    drafter: str | None
    draft_length: int | None
    threads: int | None


class Pair(Strict):
    """One figure of both models."""

    original: float | None
    compressed: float | None


class CacheBytes(Strict):
    """Bytes that the keys and values of one token take in the cache of each model."""

    original: int | None
    compressed: int | None


class Sparsity(Strict):
    """Zeros among the weights of pruned layers; bytes of their values (codes; scales not counted) in the file, and in
    a 2:4 store, null where it cannot hold them."""

    layers: int
    zero_share: float
    value_bytes: int
    two_of_four_bytes: int | None


class Size(Strict):
    """Bytes on disk and in the cache. `ratio` = original / compressed; bits over quantised weights, with all that is
    stored for them."""

    original_bytes: int
    compressed_bytes: int
    ratio: float
    bits_per_weight: float | None
    kv_bytes_per_token: CacheBytes
    draft_bytes: int | None
    peak_memory_bytes: int | None
    sparsity: Sparsity | None = None


class CorpusInfo(Strict):
    """The text: its name, the sha256 of its documents, and the interpreter whose standard library it is."""

    name: str
    sha256: str
    python: str | None


class Protocol(Strict):
    """Tokens of a window and between the starts of two, tokens predicted, how the head is stored."""

    window: int
    stride: int
    tokens: int
    head: str


class Interval95(Strict):
    """95 % bootstrap intervals [low, high]; `ratio` is compressed / original on the same resamples."""

    original: tuple[float, float]
    compressed: tuple[float, float]
    ratio: tuple[float, float]


class Perplexity(Pair):
    """Per predicted token."""

    ci95: Interval95 | None


class LayerError(Strict):
    """One quantised layer; `error` is ‖W − Ŵ‖ / ‖W‖, `output_error` the same of its outputs on calibration text."""

    name: str
    scheme: str
    group_size: int
    error: float
    output_error: float | None = None
    damping: float | None = None


class _OnCorpus(Strict):
    corpus: CorpusInfo


class Comparison(Strict):
    """Of original and compressed model on the same windows.

    perplexity      exp of the mean negative log likelihood per predicted token (nats).
    bits_per_byte   the same losses in bits over the UTF-8 bytes of the predicted text.
    top1_agreement  share of predicted tokens where both put the same token first.

    Since schema 3: token_statistics, flips (null: the text has no lines to choose from), and the verdict.
    """

    protocol: Protocol
    perplexity: Perplexity
    bits_per_byte: Pair
    kl_divergence: Divergence | None
    top1_agreement: float | None
    token_statistics: TokenStatistics | None = None
    flips: Flips | None = None
    verdict: Verdict | None = None


class Quality(Comparison, _OnCorpus):  # the corpus is written first
    """On held-out text, through the runtime, on the artifact read back."""

    kv_perplexity: float | None
    layers: list[LayerError]
    tasks: list[TaskFigures] = Field(default_factory=list)
    long_context: LongContext | None = None


class TrainingText(BaseModel):
    """What a stage trained on; its best weights were chosen on `held_out_tokens` others."""

    source: str
    documents: int
    held_out_tokens: int


class LossPoint(BaseModel):
    """Losses in nats after `tokens` tokens; each stands at some points only."""

    tokens: int
    loss: float | None = None
    held_out: float | None = None


class TrainedStage(BaseModel):
    """What every stage that trains in the loop says (the kinds say more); losses in nats on held-out text."""

    budget: dict[str, float | None] = Field(default_factory=dict)
    text: TrainingText | None = None
    steps: int
    tokens: int
    seconds: float | None
    before: float
    best: float
    best_step: int
    perplexity: dict[str, float] = Field(default_factory=dict)
    curve: list[LossPoint]


class Calibration(BaseModel):
    """What the algorithms saw. Recipes may add to `training`, which is by the kind of stage."""

    model_config = ConfigDict(extra="allow", frozen=True)
    source: str | None
    samples_requested: int | None
    samples_used: int | None
    tokens: int | None
    experts: list[ExpertRecord]
    training: dict[str, Any]

    @property
    def trained(self) -> dict[str, TrainedStage]:
        """The stages that trained in the loop, by kind."""
        stages = self.training.items()
        return {k: TrainedStage.model_validate(s) for k, s in stages if isinstance(s, dict) and "curve" in s}


class ExportSpeed(Strict):
    """Greedy decoding of an export, alone and with a draft of `draft_length`, on the same sessions, interleaved."""

    prompts: int
    new_tokens: int
    draft_length: int
    tokens_per_second: float | None
    drafter: str | None
    speculative_tokens_per_second: float | None
    acceptance_rate: float | None
    class_: LosslessClass | None
    tokens_compared: int | None
    mismatches: int | None


class ExportFigures(Strict):
    """An export read back by the runtime; both perplexities are of the same `tokens` predicted tokens."""

    engine: str
    tokens: int
    perplexity: float | None
    artifact_perplexity: float | None
    speed: ExportSpeed | None
    notes: list[str]


class ExportEntry(Strict):
    """The model in another engine's form: bytes of its weights, layers kept exactly, layers rounded again."""

    name: str
    bytes: int
    repacked: int
    requantized: list[Loss]
    worst: Loss | None
    notes: list[str]
    measured: ExportFigures | None = None


class Sample(Strict):
    """The same prompt continued greedily by both models."""

    prompt: str
    original: str
    compressed: str
    new_tokens: int


class Report(Strict):
    """report.json. `certificate`: where speed was measured; `python -m runtime.audit certificate` repeats it."""

    schema_: Literal[2, 3]
    recipe: str
    model: str
    draft: str | None
    asked: Asked
    machine: Machine
    versions: dict[str, str]
    seed: int
    size: Size
    quality: Quality
    speed: Speed
    lossless: Lossless
    certificate: Certificate | None = None
    calibration: Calibration
    left_alone: list[LeftAlone]
    sample: Sample | None
    exports: list[ExportEntry] = Field(default_factory=list)
    not_measured: dict[str, str]

    @model_validator(mode="after")
    def _every_null_has_a_reason(self) -> "Report":
        if bare := unexplained(self.to_dict()):
            raise ValueError(f"null without a reason in not_measured: {', '.join(bare)}")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for report.json. Defaults that nobody gave (a layer's damping, say) are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def reason(self, path: str) -> str | None:
        """Why the figure at a dotted path was not measured."""
        return reason_for(self.not_measured, path)
