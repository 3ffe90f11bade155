"""The sections `speed` and `lossless` of report.json; see schema.py."""

from typing import Literal

from pydantic import Field

from compress.records import Strict

PLAIN = "none"  # of drafters: plain decoding
LosslessClass = Literal["exact", "measured", "distribution", "lossy"]


class Percentiles(Strict):
    """Milliseconds between a token and the one before it; 0 within a round."""

    p50: float | None
    p90: float | None
    p99: float | None


class Decoding(Strict):
    """One way of decoding. tokens_per_second counts the prompt's time too, decode_tokens_per_second does not."""

    tokens_per_second: float | None
    ttft_ms: float | None
    itl_ms: Percentiles
    latency_ms: float | None
    mean_width: float | None
    decode_tokens_per_second: float | None
    energy_j: float | None


class Baseline(Strict):
    """transformers' generate on the original; `why` says why a row has no figure."""

    name: str
    tokens_per_second: float | None
    prompts: int | None
    new_tokens: int | None
    warm_up_seconds: float | None = None
    note: str
    why: str | None


class WidthCost(Strict):
    """A target forward of `width` rows: median milliseconds, and over width 1."""

    width: int
    ms: float
    ratio: float


class Speedup(Strict):
    """Ratios of tokens per second; decode_over_compressed leaves the prompt's time out, as predicted_speedup does."""

    over_compressed: float | None
    over_original: float | None
    decode_over_compressed: float | None
    compressed_over_original: float | None


class Group(Strict):
    """Some of the prompts."""

    name: str
    prompts: int
    repeated_4gram_share: float | None
    acceptance_rate: float | None
    tokens_per_round: float | None
    speedup_over_compressed: float | None


class Pairing(Strict):
    """The target with one drafter ("none": plain decoding), γ chosen every round unless one was asked for.

    measured      "trial": on a few tokens, with `speedup` over plain decoding of the same; null: it cannot draft.
    draft_length  γ on average over the rounds; null, as α is, where nothing is drafted.
    mismatches    of tokens_compared: where greedy text differs from plain decoding's, over all repeats.
    why           why not all prompts were decoded, or none.
    """

    drafter: str
    measured: Literal["all prompts", "trial"] | None
    tokens_per_second: float | None
    speedup: float | None
    acceptance_rate: float | None
    tokens_per_round: float | None
    draft_length: float | None
    predicted_speedup: float | None
    tokens_compared: int | None
    mismatches: int | None
    why: str | None


class Advice(Strict):
    """`band`: what α alone suggests. `draft_length`: the best as measured; 0: do not speculate."""

    band: str
    draft_length: int = Field(ge=0)
    why: str


class PlainSpeed(Strict):
    """Decoding without speculation, in one runtime, interleaved."""

    prompts: int | None
    new_tokens: int | None
    repeats: int | None
    threads: int | None
    repeated_4gram_share: float | None
    draft_length: int | None
    baselines: list[Baseline] | None
    original: Decoding | None
    compressed: Decoding | None


class Speculation(Strict):
    """Speculative decoding of the compressed model, interleaved with the plain ways.

    pairings         all drafters that there were; the first row is the best, plain decoding included.
    drafter          the first row's, whose figures `speculative` and `speedup` are: "none", and 1.00 times plain
                     decoding's speed, where speculation does not pay.
    fastest_drafter  the fastest of those that draft, whether it pays or not: the other figures are its own.
    acceptance_rate  greedy decoding's, _t1 that of sampling at temperature 1; the agreements are the draft model's,
                     teacher-forced on held-out text (speculation.teacher_forced_agreement).
    mean_draft_length  γ on average over all rounds; it, τ, c and v are of each prompt's repeat of median time, which
                     speeds are of, α and acceptance by position of all repeats.
    draft_length     γ on average over the rounds that drafted, as a whole number; what was asked for, if anything was.
    """

    speculative: Decoding | None
    pairings: list[Pairing] | None
    drafter: str | None
    fastest_drafter: str | None
    mean_draft_length: float | None
    acceptance_rate: float | None
    acceptance_rate_t1: float | None
    acceptance_rate_t1_verify: str | None
    per_token_acceptance: float | None
    teacher_forced_agreement: float | None
    teacher_forced_agreement_t1: float | None
    accepted_by_position: list[float] | None
    tokens_per_round: float | None
    draft_cost_ratio: float | None
    width_cost_ratio: float | None
    width_costs: list[WidthCost] | None
    predicted_speedup: float | None
    iid_speedup: float | None
    speedup: Speedup | None
    groups: list[Group] | None
    advice: Advice | None


class Speed(Speculation, PlainSpeed):  # the plain ways are written first
    """Decoding, in one runtime, interleaved."""

    def pace(self, name: str) -> float:
        """Tokens per second of `original`, `compressed` or `speculative`; 0 where it was not measured."""
        way: Decoding | None = getattr(self, name)
        return 0.0 if way is None else way.tokens_per_second or 0.0

    @property
    def pays(self) -> bool:
        """Whether a drafter is faster than plain decoding of the compressed model."""
        return self.drafter not in (None, PLAIN)

    @property
    def best(self) -> float:
        """Tokens per second of the faster of plain and speculative decoding of the compressed model."""
        return max(self.pace("compressed"), self.pace("speculative"))


class Lossless(Strict):
    """Speculative against plain greedy output of the compressed model, token for token, of all drafters together."""

    class_: LosslessClass | None
    verify: str | None
    tokens_compared: int | None
    mismatches: int | None
