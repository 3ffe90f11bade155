"""The form of report.json, and the check that every figure is there or says why it is not.

The convention for what was not measured: the key stays, its value is null, and the top-level `not_measured` maps the
figure's dotted path to the reason. A path covers everything below it ("speed" covers all of `speed`), `*` stands for
one key, and list entries are named by their index ("speed.baselines.2.tokens_per_second"). No null is without a reason,
and no number is a guess.

Units: bytes, milliseconds, tokens per second, joules; shares and ratios are plain numbers.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA = 1


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(_Strict):
    """Where it ran. `instruction_path` is the compressed model's kernels: a name of runtime.kernels.available(), and
    behind it the libraries that run some of the layers."""

    cpu: str
    cores: int
    instruction_path: str
    device: str


class Asked(_Strict):
    """What the user asked for: the command without directories, the complete recipe, how to measure."""

    command: str
    recipe: dict[str, Any]
    samples: int
    seq_len: int
    eval_tokens: int
    new_tokens: int
    draft_length: int
    threads: int | None


class Pair(_Strict):
    """One figure of both models."""

    original: float | None
    compressed: float | None


class Sparsity(_Strict):
    """Zeros among the weights of pruned layers; bytes of their values in the file, and in a 2:4 store."""

    layers: int
    zero_share: float
    value_bytes: int
    two_of_four_bytes: int | None


class Size(_Strict):
    """Bytes on disk and in the cache. `ratio` = original / compressed; bits over quantised weights, scales included."""

    original_bytes: int
    compressed_bytes: int
    ratio: float
    bits_per_weight: float | None
    kv_bytes_per_token: Pair
    draft_bytes: int | None
    peak_memory_bytes: int | None
    sparsity: Sparsity | None = None


class CorpusInfo(_Strict):
    """The text: its name, the sha256 of its documents, and the interpreter whose standard library it is."""

    name: str
    sha256: str
    python: str | None


class Protocol(_Strict):
    """Tokens of a window and between the starts of two, tokens predicted, how the head is stored."""

    window: int
    stride: int
    tokens: int
    head: str


class Interval95(_Strict):
    """95 % bootstrap intervals [low, high]; `ratio` is compressed / original on the same resamples."""

    original: tuple[float, float]
    compressed: tuple[float, float]
    ratio: tuple[float, float]


class Perplexity(Pair):
    """Per predicted token."""

    ci95: Interval95 | None


class Divergence(_Strict):
    """KL(original ‖ compressed) per token, nats."""

    mean: float
    p99: float


class LayerError(_Strict):
    """One quantised layer; `error` is ‖W − Ŵ‖ / ‖W‖, `output_error` the same of its outputs on calibration text."""

    name: str
    scheme: str
    group_size: int
    error: float
    output_error: float | None = None
    damping: float | None = None


class Quality(_Strict):
    """On held-out text, through the runtime, on the artifact read back."""

    corpus: CorpusInfo
    protocol: Protocol
    perplexity: Perplexity
    bits_per_byte: Pair
    kl_divergence: Divergence | None
    top1_agreement: float | None
    kv_perplexity: float | None
    layers: list[LayerError]


class Percentiles(_Strict):
    """Milliseconds between a token and the one before it; 0 within a round."""

    p50: float | None
    p90: float | None
    p99: float | None


class Way(_Strict):
    """One way of decoding. tokens_per_second counts the prompt's time too, decode_tokens_per_second does not."""

    tokens_per_second: float | None
    decode_tokens_per_second: float | None
    ttft_ms: float | None
    itl_ms: Percentiles
    latency_ms: float | None
    mean_width: float | None
    energy_j: float | None


class Baseline(_Strict):
    """transformers' generate on the original; `why` says why a row has no figure."""

    name: str
    tokens_per_second: float | None
    prompts: int | None
    new_tokens: int | None
    warm_up_seconds: float | None = None
    note: str
    why: str | None


class WidthCost(_Strict):
    """A target forward of `width` rows: median milliseconds, and over width 1."""

    width: int
    ms: float
    ratio: float


class Speedup(_Strict):
    """Ratios of tokens per second; decode_over_compressed leaves the prompt's time out, as predicted_speedup does."""

    over_compressed: float | None
    over_original: float | None
    decode_over_compressed: float | None
    compressed_over_original: float | None


class Group(_Strict):
    """Some of the prompts."""

    name: str
    prompts: int
    repeated_4gram_share: float | None
    acceptance_rate: float | None
    tokens_per_round: float | None
    speedup_over_compressed: float | None


class AdviceInfo(_Strict):
    """See advice.py. draft_length 0: do not speculate."""

    band: str
    draft_length: int = Field(ge=0)
    why: str


class Speed(_Strict):
    """Decoding, in one runtime, interleaved."""

    prompts: int | None
    new_tokens: int | None
    repeats: int | None
    threads: int | None
    repeated_4gram_share: float | None
    original: Way | None
    compressed: Way | None
    speculative: Way | None
    baselines: list[Baseline] | None
    drafter: str | None
    acceptance_rate: float | None
    acceptance_rate_t1: float | None
    acceptance_rate_t1_verify: str | None
    per_token_acceptance: float | None
    teacher_forced_agreement: float | None
    teacher_forced_agreement_t1: float | None
    accepted_by_position: list[float] | None
    tokens_per_round: float | None
    draft_length: int | None
    draft_cost_ratio: float | None
    width_cost_ratio: float | None
    width_costs: list[WidthCost] | None
    predicted_speedup: float | None
    iid_speedup: float | None
    speedup: Speedup | None
    groups: list[Group] | None
    advice: AdviceInfo | None


class Lossless(_Strict):
    """Speculative against plain greedy output of the compressed model, token for token."""

    class_: Literal["exact", "measured", "distribution", "lossy"] | None = Field(alias="class")
    verify: str | None
    tokens_compared: int | None
    mismatches: int | None


class ExpertEntry(_Strict):
    """One expert: its block, its number there, the calibration tokens routed to it; `handled` as in ExpertRecord."""

    block: int
    expert: int
    tokens: int
    handled: Literal["calibrated", "all tokens", "rounded to nearest"]


class Calibration(BaseModel):
    """What the algorithms saw. Recipes may add to `training`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    source: str | None
    samples_requested: int | None
    samples_used: int | None
    tokens: int | None
    experts: list[ExpertEntry]
    training: dict[str, Any]


class LeftAloneEntry(_Strict):
    """A tensor or layer that stayed as it was."""

    layer: str
    why: str


class ExportLoss(_Strict):
    """A layer that an export had to round again: ‖W' − W‖ / ‖W‖ against the artifact's weight."""

    layer: str
    error: float


class ExportSpeed(_Strict):
    """Greedy decoding of an export, alone and with a draft of `draft_length`, on the same sessions, interleaved."""

    prompts: int
    new_tokens: int
    draft_length: int
    drafter: str | None
    tokens_per_second: float | None
    speculative_tokens_per_second: float | None
    acceptance_rate: float | None
    class_: Literal["exact", "measured", "distribution", "lossy"] | None = Field(alias="class")
    tokens_compared: int | None
    mismatches: int | None


class ExportFigures(_Strict):
    """An export read back by the runtime; both perplexities are of the same `tokens` predicted tokens."""

    engine: str
    tokens: int
    perplexity: float | None
    artifact_perplexity: float | None
    speed: ExportSpeed | None
    notes: list[str]


class ExportEntry(_Strict):
    """The model in another engine's form: bytes of its weights, layers kept exactly, layers rounded again."""

    name: str
    bytes: int
    repacked: int
    requantized: list[ExportLoss]
    worst: ExportLoss | None
    notes: list[str]
    measured: ExportFigures | None


class Sample(_Strict):
    """The same prompt continued greedily by both models."""

    prompt: str
    original: str
    compressed: str
    new_tokens: int


class Report(_Strict):
    """report.json."""

    schema_: Literal[1] = Field(alias="schema")
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
    calibration: Calibration
    left_alone: list[LeftAloneEntry]
    sample: Sample | None
    exports: list[ExportEntry] = []
    not_measured: dict[str, str]

    @model_validator(mode="after")
    def _every_null_has_a_reason(self) -> "Report":
        data = self.model_dump(by_alias=True)
        bare = unexplained(data)
        if bare:
            raise ValueError(f"null without a reason in not_measured: {', '.join(bare)}")
        return self


# Nulls that are statements rather than missing figures: no draft, no interpreter, nothing pruned, no failure.
_STATEMENTS = (
    "draft",
    "asked.*",
    "size.sparsity",
    "quality.corpus.python",
    "exports.*.worst",
    "quality.layers.*.output_error",
    "quality.layers.*.damping",
    "speed.baselines.*.why",
    "speed.baselines.*.prompts",
    "speed.baselines.*.new_tokens",
    "speed.baselines.*.warm_up_seconds",
)


def unexplained(report: dict[str, Any]) -> list[str]:
    """Paths of nulls that neither are statements nor stand under a path of `not_measured`."""
    reasons = tuple(report.get("not_measured", {}))
    return [
        path
        for path in null_paths(report)
        if not any(covers(reason, path) for reason in reasons)
        # A statement is about itself, not about what would stand below it.
        and not any(covers(said, path) and said.count(".") == path.count(".") for said in _STATEMENTS)
    ]


def reason_for(report: dict[str, Any], path: str) -> str | None:
    """Why the figure at a dotted path was not measured: the most specific reason."""
    found = [reason for reason in report["not_measured"] if covers(reason, path)]
    return report["not_measured"][max(found, key=lambda r: r.count("."))] if found else None


def covers(reason: str, path: str) -> bool:
    """Whether a path of `not_measured` stands for `path`: itself or something above it."""
    wanted, parts = reason.split("."), path.split(".")
    return len(wanted) <= len(parts) and all(fnmatchcase(p, w) for w, p in zip(wanted, parts, strict=False))


def null_paths(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all nulls, depth first. The reasons themselves are not looked at."""
    if value is None:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        if not path and key == "not_measured":
            continue
        yield from null_paths(item, f"{path}.{key}" if path else str(key))


def validate(report: dict[str, Any]) -> Report:
    """The report as an object. Raises ValidationError (a programming error) where a key or a reason is missing."""
    return Report.model_validate(report)
