"""From logits to a probability row: penalties, temperature, top-k, top-p, min-p.

The order and the meaning are those of transformers' `generate` (`LogitsProcessor`s): repetition penalty, temperature,
top-k, top-p, min-p. Presence and frequency penalties, which transformers lacks, follow the repetition penalty and count
the generated tokens only, as in OpenAI's API and vLLM; the repetition penalty sees the prompt too. Everything is
float64 on the CPU and one row at a time, so that a row's result does not depend on how many rows came with it.

On the CPU the work is numpy's, in one thread: torch would start threads of its own for it, which then wait busily
beside those of the kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import UserError

# What `host` gives: numpy, or the tensor of another device.
Logits = Tensor | NDArray[Any]
# More than the rounding of any sum of probabilities: it stays below 2**-53 times the number of tokens.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. The defaults are greedy decoding without penalties.

    temperature          0: the most probable token (after penalties); otherwise logits are divided by it.
    top_k                keep the k most probable tokens; 0: all.
    top_p                keep the smallest set of most probable tokens with at least this mass; 1: all.
    min_p                drop tokens less probable than this share of the most probable one; 0: none.
    repetition_penalty   divides positive and multiplies negative logits of every token seen (CTRL, 1909.05858); 1: off.
    presence_penalty     subtracted once from every generated token's logit; 0: off.
    frequency_penalty    subtracted once per earlier generation of the token; 0: off.
    seed                 of the position-keyed noise, in [0, 2**64).

    Raises UserError for a value out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._require("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "0 (greedy) or more")
        self._require(
            "top_k", self.top_k >= 0 and self.top_k == int(self.top_k), "0 (all tokens) or a positive integer"
        )
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._require("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        self._require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1 is off)")
        self._require("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        self._require("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        self._require("seed", 0 <= self.seed < 2**64 and self.seed == int(self.seed), "an integer from 0 to 2**64 - 1")

    def _require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UserError(f"{key} must be {expected}, but is {getattr(self, key)}; choose a value in that range.")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, without any randomness."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens before it other than through the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def host(logits: Logits) -> Logits:
    """The same logits as numpy where they lie on the CPU. Those of another device stay there until they are read."""
    if not isinstance(logits, Tensor) or logits.device.type != "cpu":
        return logits
    # numpy has no bfloat16, and float32 holds all of its values.
    plain = logits.float() if logits.dtype == torch.bfloat16 else logits
    array: NDArray[Any] = plain.detach().numpy()
    return array


class Distributions:
    """The target's (or draft's) distribution at each row, computed when it is asked for.

    logits         (n, V) or (V,) float, a tensor or numpy: row i follows `tokens` and then paths[i].
    tokens         the text before every row, prompt included; only read when there are penalties.
    paths          n token lists, the draft tokens between the text and each row (None: none for any row).
    prompt_length  how many of `tokens` are the prompt.

    Verification often stops at the first row, so rows that the walk does not reach cost nothing.
    """

    def __init__(
        self,
        logits: Logits,
        sampling: Sampling,
        tokens: Sequence[int] = (),
        paths: Sequence[Sequence[int]] | None = None,
        prompt_length: int = 0,
    ) -> None:
        rows = host(logits)
        self._logits = rows[None] if rows.ndim == 1 else rows
        self._sampling = sampling
        self._paths = paths
        self._prompt_length = prompt_length
        self._text = np.asarray(tokens if sampling.penalised else (), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int) -> Tensor:
        """(V,) float64 probabilities; one-hot when the sampling is greedy."""
        return torch.from_numpy(self.array(row))

    def array(self, row: int) -> NDArray[np.float64]:
        """The same row as numpy."""
        scores = self.scores(row)
        if self._sampling.greedy:
            one_hot = np.zeros_like(scores)
            one_hot[scores.argmax()] = 1.0
            return one_hot
        return _warp(scores, self._sampling)

    def scores(self, row: int) -> NDArray[np.float64]:
        """(V,) float64 logits after penalties."""
        logits = self._logits[row]
        scores = np.array(host(logits.cpu() if isinstance(logits, Tensor) else logits), dtype=np.float64)
        if self._sampling.penalised:
            path = np.asarray(self._paths[row] if self._paths is not None else (), dtype=np.int64)
            prefix = np.concatenate([self._text, path])
            _penalise(scores, prefix, self._prompt_length, self._sampling)
        return scores


def probabilities(
    logits: Tensor,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    paths: Sequence[Sequence[int]] | None = None,
    prompt_length: int = 0,
) -> Tensor:
    """The rows' distributions: (n, V) logits to (n, V) float64, (V,) to (V,). Arguments as in `Distributions`."""
    rows = Distributions(logits, sampling, tokens, paths, prompt_length)
    if logits.dim() == 1:
        return rows[0]
    return torch.stack([rows[i] for i in range(len(rows))]) if len(rows) else logits.to("cpu", torch.float64)


def greedy_choices(
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    paths: Sequence[Sequence[int]] | None = None,
    prompt_length: int = 0,
) -> list[int]:
    """The most probable token of each of (n, V) rows after penalties; the lowest id of equals."""
    if not sampling.penalised:
        return _largest(host(logits))[0]
    rows = Distributions(logits, sampling, tokens, paths, prompt_length)
    return [int(rows.scores(i).argmax()) for i in range(len(rows))]


def finite_choices(logits: Logits, model: str) -> list[int]:
    """The most probable token of each of (n, V) rows before any penalty; the lowest id of equals.

    Raises UserError where a row has a NaN, an infinity, or nothing above −inf (a masked token).
    """
    choices, values = _largest(host(logits))
    if not all(map(math.isfinite, values)):
        raise not_finite(model)
    return choices


def not_finite(model: str) -> UserError:
    """What to raise for logits of "the target" or "the draft" that are no numbers."""
    return UserError(
        f"the {model}'s logits must be finite, but a row holds NaN or Inf; its weights are damaged or its "
        "activations overflow, so check the checkpoint."
    )


def _largest(logits: Logits) -> tuple[list[int], list[float]]:
    """Where each of (n, V) rows is largest (the first of equals), and what stands there: NaN if the row has one."""
    if isinstance(logits, Tensor):
        maxima = logits.max(dim=-1)
        return maxima.indices.tolist(), maxima.values.tolist()
    at: list[int] = logits.argmax(axis=-1).tolist()
    return at, [logits.item(row, column) for row, column in enumerate(at)]


def _penalise(scores: NDArray[np.float64], prefix: NDArray[np.int64], prompt_length: int, sampling: Sampling) -> None:
    """Changes scores (V,) in place. Ids beyond V (an embedding longer than the head) cannot be chosen anyway."""
    if sampling.repetition_penalty != 1:
        seen = prefix[prefix < len(scores)]
        value = scores[seen]
        # A token may occur twice in `seen`: both times the new value comes from the old one, so it is penalised once.
        scores[seen] = np.where(value < 0, value * sampling.repetition_penalty, value / sampling.repetition_penalty)
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        generated = prefix[prompt_length:]
        ids, counts = np.unique(generated[generated < len(scores)], return_counts=True)
        scores[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _warp(scores: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """(V,) penalised logits to (V,) probabilities at a temperature above 0; overwrites the logits."""
    highest = scores.max()
    if 0 < sampling.top_k < len(scores):
        threshold = np.partition(scores, len(scores) - sampling.top_k)[len(scores) - sampling.top_k]
        scores = np.where(scores < threshold, -np.inf, scores)
    row = np.subtract(scores, highest, out=scores)
    # A very small temperature overflows to −inf, whose exponential is the right 0.
    with np.errstate(over="ignore"):
        row /= sampling.temperature
    np.exp(row, out=row)
    row /= row.sum()
    if sampling.top_p < 1:
        # A threshold rather than a number of tokens: of equally probable ones all stay.
        row[row < _nucleus(row, 1 - sampling.top_p)] = 0
        row /= row.sum()
    if sampling.min_p > 0:
        row[row < sampling.min_p * row.max()] = 0
        row /= row.sum()
    return row


def _nucleus(row: NDArray[np.float64], spare: float) -> float:
    """The smallest probability that top-p keeps of (V,) `row`: the smaller ones add up to at most `spare`."""
    # Tokens below this bound are dropped in any case: together they have at most half of `spare`. So only the others
    # are sorted, few of a vocabulary as a rule, unless rounding could make a difference to sorting all of them.
    head = row[row >= spare / (2 * len(row))]
    head.sort()
    sums = np.cumsum(head)
    sums += row.sum() - sums[-1]
    dropped = int(sums.searchsorted(spare, side="right"))
    if any(abs(total - spare) < _ROUNDING for total in sums[max(dropped - 1, 0) : dropped + 1].tolist()):
        head = np.sort(row)
        dropped = int(np.cumsum(head).searchsorted(spare, side="right"))
    return float(head[min(dropped, len(head) - 1)])
