"""From rows of logits to probabilities and most probable tokens, by the steps that params.py lists."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import UserError
from runtime.native.binding import fastest, require
from runtime.sampling import processors
from runtime.sampling.constraint import Constraint
from runtime.sampling.params import Sampling

# What `host` gives: numpy, or the tensor of another device.
Logits = Tensor | NDArray[Any]


def host(logits: Logits) -> Logits:
    """The same logits as numpy where they lie on the CPU. Those of another device stay there until they are read."""
    if not isinstance(logits, Tensor) or not logits.is_cpu:
        return logits
    # numpy has no bfloat16, and float32 holds all of its values.
    plain = logits.float() if logits.dtype is torch.bfloat16 else logits
    # Each step of this is felt by a small model's rounds.
    array: NDArray[Any] = (plain.detach() if plain.requires_grad else plain).numpy()
    return array


class Distributions:
    """The target's (or draft's) distribution at each row, computed when it is asked for.

    logits         (n, V) or (V,) float, a tensor or numpy: row i follows `tokens` and then paths[i].
    tokens         the text before every row, prompt included; only read where the sampling is not `plain`.
    paths          n token lists, the draft tokens between the text and each row (None: none for any row).
    prompt_length  how many of `tokens` are the prompt.
    stop_tokens    what `min_tokens` keeps from coming too early.
    grammar        what the text must keep to; it stands at the end of `tokens`.

    Verification often stops at the first row, so rows that the walk does not reach cost nothing.
    """

    def __init__(
        self,
        logits: Logits,
        sampling: Sampling,
        tokens: Sequence[int] = (),
        paths: Sequence[Sequence[int]] | None = None,
        prompt_length: int = 0,
        stop_tokens: Collection[int] = (),
        grammar: Constraint | None = None,
    ) -> None:
        rows = host(logits)
        self._logits = rows[None] if rows.ndim == 1 else rows
        self._sampling = sampling
        self._paths = paths
        self._prompt_length = prompt_length
        self._generated = len(tokens) - prompt_length
        self._stop_tokens = stop_tokens
        self._grammar = grammar
        self._forbidden: Collection[int] = ()
        self._bias = dict(sampling.logit_bias)
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
        warped = processors.softmax(scores, self._sampling.temperature, self._sampling.top_k)
        if self._sampling.top_p < 1:
            processors.keep_nucleus(warped, self._sampling.top_p)
        if self._sampling.min_p > 0:
            processors.keep_likely(warped, self._sampling.min_p)
        return warped

    def forbid(self, rows: Collection[int]) -> None:
        """These rows hold no numbers: whoever comes to them is told so by a UserError."""
        self._forbidden = rows

    def choice(self, row: int, likely: int | None = None) -> int:
        """The most probable token of a row after bias, penalties and grammar; the lowest id of equals.

        likely  what it is without the grammar, where that is known.
        """
        if self._grammar is None:
            return int(self.scores(row).argmax())
        # Few winners break the grammar, and without the losers that do the winner is the same.
        best = int(self.scores(row, masked=False).argmax()) if likely is None else likely
        if row not in self._forbidden and self._grammar.allows(self._path(row), best):
            return best
        return int(self.scores(row).argmax())

    def argmax(self) -> list[int]:
        """The most probable token of each row after bias and penalties; the lowest id of equals."""
        if self._sampling.plain and self._grammar is None:
            return finite_argmax(self._logits)
        return [self.choice(i) for i in range(len(self))]

    def scores(self, row: int, masked: bool = True) -> NDArray[np.float64]:
        """(V,) float64 logits after grammar (if `masked`), bias and penalties.

        Raises UserError where `min_tokens` leaves no token that can be chosen, or logits are known to be no numbers.
        """
        if row in self._forbidden:
            raise not_finite("target")
        logits, sampling = self._logits[row], self._sampling
        scores = np.array(host(logits.cpu() if isinstance(logits, Tensor) else logits), dtype=np.float64)
        path = self._path(row)
        if self._grammar is not None and masked:
            scores[~self._grammar.mask(path)[: len(scores)]] = -np.inf
            if scores.max() == -np.inf:
                raise UserError("the model gives no probability to any token that the grammar allows; ask without it.")
        if self._generated + len(path) < sampling.min_tokens:
            processors.forbid(scores, self._stop_tokens)
            if scores.max() == -np.inf:
                raise UserError(
                    f"min_tokens is {sampling.min_tokens}, but after {self._generated + len(path)} tokens only stop "
                    "tokens can follow; choose fewer tokens or other stop tokens."
                )
        if self._bias:
            processors.add_bias(scores, self._bias)
        if sampling.penalised:
            prefix = np.concatenate([self._text, np.asarray(path, dtype=np.int64)])
            if sampling.repetition_penalty != 1:
                processors.penalise_seen(scores, prefix, sampling.repetition_penalty)
            if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
                generated = prefix[self._prompt_length :]
                processors.penalise_generated(scores, generated, sampling.presence_penalty, sampling.frequency_penalty)
        return scores

    def _path(self, row: int) -> Sequence[int]:
        return self._paths[row] if self._paths is not None else ()


def argmax_tokens(logits: Logits, model: str) -> list[int]:
    """The most probable token of each of (n, V) rows before any penalty; the lowest id of equals.

    Raises UserError where a row has a NaN, an infinity, or nothing above −inf (a masked token).
    """
    choices = finite_argmax(logits)
    if -1 in choices:
        raise not_finite(model)
    return choices


def not_finite(model: str) -> UserError:
    """What to raise for logits of "the target" or "the draft" that are no numbers."""
    return UserError(
        f"the {model}'s logits must be finite, but a row holds NaN or Inf; its weights are damaged or its "
        "activations overflow, so check the checkpoint."
    )


def finite_argmax(logits: Logits) -> list[int]:
    """Where each of (n, V) rows is largest, the first of equals; −1 for a row with a NaN, +inf, or nothing above −inf.

    The native library looks for it where it can, which takes a third of numpy's time: rounds of small models feel it.
    """
    path = fastest()
    if isinstance(logits, Tensor) and not logits.is_cpu:
        maxima = logits.max(dim=-1)
        at, values = maxima.indices.tolist(), maxima.values.tolist()
    elif isinstance(logits, Tensor) and path is not None and logits.dtype is torch.float32 and logits.is_contiguous():
        rows, size = logits.shape
        first, step, largest = logits.data_ptr(), logits.itemsize * size, require().specpress_largest
        return [largest(path, first + step * row, size, size) for row in range(rows)]
    else:
        array: NDArray[Any] = np.asarray(host(logits))
        at = array.argmax(axis=-1).tolist()
        values = [array.item(row, column) for row, column in enumerate(at)]
    return [token if math.isfinite(value) else -1 for token, value in zip(at, values, strict=True)]
