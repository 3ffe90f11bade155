"""The parts of the section `quality` that this package measures; shares and probabilities are plain numbers."""

from typing import Literal

from compress.records import Strict

Part = Literal["losses", "choices"]
Call = Literal["better", "same", "worse", "cannot tell"]


class Estimate(Strict):
    """A figure with its standard error, which takes tokens for independent."""

    value: float
    error: float


class Divergence(Strict):
    """KL(original ‖ compressed) per token, nats; `mean_error`: the standard error. Reports of schema 2 have the
    mean and the 99th percentile alone."""

    mean: float
    p99: float
    mean_error: float | None = None
    median: float | None = None
    p999: float | None = None
    max: float | None = None


class TokenStatistics(Strict):
    """As llama.cpp's `llama-perplexity --kl-divergence` has them.

    perplexity_ratio  compressed / original.
    delta_p_rms       root mean square of the change of the probability that the text's token gets.
    same_top          share of tokens where both models put the same one first.
    """

    perplexity_ratio: Estimate
    delta_p_rms: Estimate
    same_top: Estimate


class Flips(Strict):
    """Choices of the next line by both models, paired: McNemar's exact test.

    options        lines to choose from, one of them the true one.
    original, compressed  shares of right choices.
    lost, won      choices that only the original, and only the compressed model, gets right: flips.
    changed        choices that differ, right or wrong.
    p_value        of McNemar's exact test, two-sided.
    ci95           of compressed − original (Agresti and Min, 2005).
    smallest_loss  of right choices that the test would have found at `power`, with as many flips as there were.
    """

    choices: int
    options: int
    original: float
    compressed: float
    lost: int
    won: int
    changed: int
    p_value: float
    ci95: tuple[float, float]
    smallest_loss: float
    power: float


class TaskFigures(Strict):
    """One metric of one of lm-eval's tasks by both models, on the same samples.

    error      standard error of the original's figure, as lm-eval gives it; null where it gives none.
    lost, won  samples that only the original, and only the compressed model, gets right, and McNemar's exact test of
               them; null for a metric that is not right or wrong.
    """

    task: str
    metric: str
    samples: int
    original: float
    compressed: float
    error: float | None
    lost: int | None
    won: int | None
    p_value: float | None


class PositionBucket(Strict):
    """Perplexity of the tokens that stand at positions `first` to `last` of their windows."""

    first: int
    last: int
    tokens: int
    perplexity: float


class Needles(Strict):
    """Values found again in texts of `length` tokens, from `depth` of the text; log-likelihood in nats a token."""

    length: int
    depth: float
    tries: int
    found: int
    log_likelihood: float


class LongContextRow(Strict):
    """One model through one kind of cache; `why` it was not run, and null where it was."""

    model: str
    cache: str
    buckets: list[PositionBucket]
    needles: list[Needles]
    why: str | None = None


class LongContext(Strict):
    """Both models on `windows` windows of `length` tokens."""

    length: int
    windows: int
    rows: list[LongContextRow]


class Verdict(Strict):
    """Whether the compressed model predicts the text worse than the original does.

    level, power     of the tests: an equal model is called worse at most `level` of the time, and better as seldom.
    change, ci95     of perplexity, compressed / original − 1, from the paired losses of `blocks` blocks; through the
                     compressed model's own cache.
    blocks, unit     independent parts of the text, and what each is.
    margin           "same" means that the change of perplexity lies within ± this; choices_margin: of right choices.
    within_margin    whether it does, shown at `level`.
    smallest_change  of perplexity that these blocks show at `power`.
    by               what the call rests on: losses, choices.
    needs_tokens, needs_choices  with which a call within the margins could be made at `power`; null where one was
                     made, or where that part did make one.
    """

    call: Call
    level: float
    power: float
    change: float
    ci95: tuple[float, float]
    blocks: int
    unit: Literal["document", "window"]
    margin: float
    choices_margin: float
    within_margin: bool
    smallest_change: float
    by: list[Part]
    needs_tokens: int | None
    needs_choices: int | None
