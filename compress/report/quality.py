"""The report's `quality` section: how much of the original's behaviour the compressed model has kept.

Both are measured through the runtime's decoders on the same windows, each window in a fresh cache. Losses are summed
in float64 over float32 logits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from calib.windows import Windows
from compress.errors import UserError
from compress.logits import kl_rows, log_probabilities, token_nll
from compress.quality.statistics import Floats, divergence, token_statistics
from compress.report.not_measured import NO_QUALITY, Reasons
from compress.report.schema import Comparison, Interval95, Pair, Perplexity, Protocol
from runtime.contract import CacheKind, Decoder, Rows

# Positions in one forward, and logits of them in float64 at a time: 32 MB, whatever the vocabulary.
_BLOCK = 256
_ELEMENTS = 1 << 22
_NEW = ("token_statistics", "flips", "verdict")
RESAMPLES = 10_000
_MOST_NATS = 700  # exp overflows above 709


def measure(
    original: Decoder,
    compressed: Decoder,
    windows: Windows,
    seed: int,
    *,
    head: str = "keep",
    kind: CacheKind = "float32",
    on_step: Callable[[int, int], None] | None = None,
) -> tuple[Comparison, Reasons]:
    """Compares both models on windows of held-out text.

    windows  the evaluation part is measured: every token of a window but its first is predicted.
    head     how the compressed model's output head is stored, as the recipe says it: it belongs to the protocol.
    kind     of the compressed model's cache.
    on_step  told (windows done, windows) after each window.

    Each resample of `ci95.ratio` takes the same windows of both models: what the text's difficulty adds to both
    cancels, so that this is the interval to judge a recipe by.

    Raises UserError for logits that are NaN or infinite (model, window and position named), for models of different
    vocabularies, and for windows that a model cannot take.
    """
    scores = score(original, compressed, windows, kind, on_step)
    return summarise(scores, windows.evaluation_bytes, windows.length, head, seed)


@dataclass(frozen=True, eq=False)
class WindowScores:
    """Of the n predicted tokens of one window, each (n,) float64 on the CPU: losses and divergence in nats.

    agrees is (n,) bool: both models put the same token first.
    """

    original_nll: Tensor
    compressed_nll: Tensor
    kl: Tensor
    agrees: Tensor


def score(
    original: Decoder,
    compressed: Decoder,
    windows: Windows,
    kind: CacheKind = "float32",
    on_step: Callable[[int, int], None] | None = None,
) -> list[WindowScores]:
    """The scores of all evaluation windows; arguments and errors as of `measure`."""
    _check(original, compressed, windows)
    scores: list[WindowScores] = []
    for index, tokens in enumerate(windows.evaluation):
        scores.append(score_window(original, compressed, tokens, index, kind))
        if on_step is not None:
            on_step(index + 1, len(windows.evaluation))
    return scores


def score_window(
    original: Decoder, compressed: Decoder, tokens: Tensor, index: int = 0, kind: CacheKind = "float32"
) -> WindowScores:
    """Scores one window, tokens (length,) int64, of both models, a block of positions at a time.

    Both models' logits of a block, and never of more, are in memory together. `index` is for error messages;
    the compressed model's keys and values go through a cache of `kind`.
    """
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for (start, reference), (_, found) in zip(
        _logits(original, tokens), _logits(compressed, tokens, kind), strict=True
    ):
        for name, logits in (("original", reference), ("compressed", found)):
            _check_finite(logits, f"the {name} model's logits in window {index + 1}", start)
        targets = tokens[start + 1 : start + 1 + len(reference)]
        step = max(1, _ELEMENTS // reference.shape[1])
        for ours, theirs, wanted in zip(
            *(rows.to(reference.device).split(step) for rows in (reference, found, targets)), strict=True
        ):
            p, q = log_probabilities(ours), log_probabilities(theirs)
            agrees = ours.argmax(1) == theirs.argmax(1)
            parts.append((token_nll(p, wanted), token_nll(q, wanted), kl_rows(p, q), agrees))
    return WindowScores(*(torch.cat(column).cpu() for column in zip(*parts, strict=True)))


def kv_losses(decoder: Decoder, windows: Windows, kind: CacheKind) -> Floats:
    """`window_losses` of the evaluation windows when all keys and values go through a cache of `kind`.

    To be held against `WindowScores.compressed_nll`, which the same windows gave through a float32 cache.
    """
    what = f"the compressed model's logits through an {kind} cache"
    return window_losses(decoder, windows.evaluation, what, kind, "leave the recipe's key kv out, or take int8")


def perplexity(decoder: Decoder, windows: Tensor, what: str) -> float:
    """Perplexity on windows (E, L) int64; arguments and errors as of `window_losses`."""
    return math.exp(window_losses(decoder, windows, what).mean())


def window_losses(
    decoder: Decoder, windows: Tensor, what: str, kind: CacheKind = "float32", remedy: str = "export again"
) -> Floats:
    """Mean loss (E,) float64, nats a token, of windows (E, L) int64, each in a fresh cache of `kind`.

    what  names the logits in errors. Raises UserError for logits that are NaN or infinite, for windows longer than the
    decoder's positions, or a loss that has no finite perplexity, against which `remedy` is advised.
    """
    if windows.shape[1] > decoder.max_positions:
        raise UserError(
            f"{what}: expected windows of at most the model's {decoder.max_positions} positions, found"
            f" {windows.shape[1]}: ask for shorter ones"
        )
    found = np.zeros(len(windows))
    for index, tokens in enumerate(windows):
        losses = []
        for start, logits in _logits(decoder, tokens, kind):
            _check_finite(logits, f"{what} in window {index + 1}", start)
            wanted = tokens[start + 1 : start + 1 + len(logits)].to(logits.device)
            step = max(1, _ELEMENTS // logits.shape[1])
            for rows, targets in zip(logits.split(step), wanted.split(step), strict=True):
                losses.append(token_nll(log_probabilities(rows), targets).cpu())
        found[index] = float(torch.cat(losses).mean())
    mean = float(found.mean())
    if mean >= _MOST_NATS:
        raise UserError(f"{what}: the loss per token is {mean:.4g} nats, which has no finite perplexity: {remedy}")
    return found


def _logits(decoder: Decoder, tokens: Tensor, kind: CacheKind = "float32") -> Iterator[tuple[int, Tensor]]:
    """Yields (first position, logits (n, vocabulary) float32) for blocks of all positions but the last."""
    cache = decoder.new_cache(kind)
    request = cache.open(len(tokens))
    count = len(tokens) - 1
    for start in range(0, count, _BLOCK):
        block = tokens[start : min(start + _BLOCK, count)]
        # Around the forward alone: a mode held over a yield would leak into whoever iterates.
        with torch.inference_mode():
            logits = decoder.forward(block, Rows.chains([(request, start, len(block))]), cache).logits
        yield start, logits
    cache.close(request)


def bootstrap_interval(
    samples: Floats,
    statistic: Callable[[Floats], Floats],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap (Efron, 1979) of a statistic of mean rows.

    samples (n, k): n independent samples of k figures that stay together when samples are drawn again (that is what
    makes it paired). `statistic` takes the means (r, k) of r resamples to (r,). The same seed draws the same samples.
    Raises ValueError for fewer than two samples, of which no spread can be told.
    """
    if len(samples) < 2:
        raise ValueError(f"a bootstrap needs at least 2 samples, found {len(samples)}")
    generator = np.random.default_rng(seed)
    # How often each sample is in a resample: (r, n) counts make the means one product, however many samples there are.
    share = np.full(len(samples), 1 / len(samples))
    means = [
        generator.multinomial(len(samples), share, size=min(1000, resamples - done)) @ samples / len(samples)
        for done in range(0, resamples, 1000)
    ]
    low, high = np.quantile(statistic(np.concatenate(means)), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summarise(
    scores: list[WindowScores], window_bytes: Tensor, window: int, head: str = "keep", seed: int = 0
) -> tuple[Comparison, Reasons]:
    """The figures of the scores of windows of equal length; `window_bytes` (E,) as in `Windows`."""
    losses = np.array([[float(s.original_nll.mean()), float(s.compressed_nll.mean())] for s in scores])
    kl = np.concatenate([s.kl.numpy() for s in scores])
    total_bytes = int(window_bytes.sum())
    mean = losses.mean(0)
    if not (np.isfinite(kl).all() and mean.max() < _MOST_NATS):
        raise UserError(
            f"the loss per token is {mean[0]:.4g} nats for the original and {mean[1]:.4g} for the compressed model, "
            "which has no finite perplexity: check the weights"
        )
    missing: Reasons = {}
    intervals = None
    if len(scores) > 1:
        intervals = Interval95(
            original=bootstrap_interval(losses, lambda means: np.exp(means[:, 0]), seed=seed),
            compressed=bootstrap_interval(losses, lambda means: np.exp(means[:, 1]), seed=seed),
            ratio=bootstrap_interval(losses, lambda means: np.exp(means[:, 1] - means[:, 0]), seed=seed),
        )
    else:
        missing["quality.perplexity.ci95"] = "one window tells no spread: evaluate more tokens"
    bits = Pair(original=None, compressed=None)
    if total_bytes:
        per_byte = mean * len(kl) / math.log(2) / total_bytes
        bits = Pair(original=float(per_byte[0]), compressed=float(per_byte[1]))
    else:
        missing["quality.bits_per_byte"] = "the predicted tokens stand for no text"
    statistics = token_statistics(
        *(
            torch.cat([getattr(s, name) for s in scores]).numpy()
            for name in ("original_nll", "compressed_nll", "agrees")
        )
    )
    found = Comparison(
        protocol=Protocol(window=window, stride=window, tokens=len(kl), head=head),
        perplexity=Perplexity(original=math.exp(mean[0]), compressed=math.exp(mean[1]), ci95=intervals),
        bits_per_byte=bits,
        kl_divergence=divergence(kl),
        top1_agreement=statistics.same_top.value,
        token_statistics=statistics,
    )
    return found, missing


def not_measured(window: int, head: str) -> tuple[Comparison, Reasons]:
    """The section without a figure; `window` tokens would have been in one, the head is stored as `head`."""
    nothing = Comparison(
        protocol=Protocol(window=window, stride=window, tokens=0, head=head),
        perplexity=Perplexity(original=None, compressed=None, ci95=None),
        bits_per_byte=Pair(original=None, compressed=None),
        kl_divergence=None,
        top1_agreement=None,
        token_statistics=None,
        flips=None,
        verdict=None,
    )
    figures = (*("perplexity", "bits_per_byte", "kl_divergence", "top1_agreement", "kv_perplexity"), *_NEW)
    return nothing, {f"quality.{figure}": NO_QUALITY for figure in figures}


def _check(original: Decoder, compressed: Decoder, windows: Windows) -> None:
    if original.vocab_size != compressed.vocab_size:
        raise UserError(
            f"expected two models of one vocabulary, found {original.vocab_size} entries in the original and "
            f"{compressed.vocab_size} in the compressed model: compare a model with its own compression"
        )
    if not len(windows.evaluation):
        raise UserError("expected at least one evaluation window, found none: ask for more evaluation tokens")
    limit = min(original.max_positions, compressed.max_positions)
    if windows.length > limit:
        raise UserError(
            f"expected windows of at most the model's {limit} positions, found {windows.length}: ask for shorter ones"
        )
    largest = int(windows.evaluation.max())
    if largest >= original.vocab_size:
        raise UserError(
            f"expected token ids below the model's vocabulary of {original.vocab_size}, found {largest}: "
            "use the model's own tokenizer"
        )


def _check_finite(logits: Tensor, what: str, start: int) -> None:
    bad = ~torch.isfinite(logits).all(1)
    if bad.any():
        row = int(bad.nonzero()[0])
        value = float(logits[row][~torch.isfinite(logits[row])][0])
        raise UserError(
            f"{what}: expected finite numbers, found {value} at position {start + row}: "
            "the weights or a kernel are broken"
        )
