"""From logits to a probability row: logit bias, penalties, temperature, top-k, top-p, min-p.

The order and the meaning are those of transformers' `generate` (`LogitsProcessor`s): repetition penalty, temperature,
top-k, top-p, min-p. Around the repetition penalty the order is vLLM's: first stop tokens are masked while the text has
fewer than `min_tokens`, then the bias is added; presence and frequency penalties come after it and count the generated
tokens only, as in OpenAI's API. Everything is float64 on the CPU and one row at a time, so that a row's result does not
depend on how many rows came with it. What each step does to a row is in processors.py.

On the CPU the work is numpy's, in one thread: torch would start threads of its own for it, which then wait busily
beside those of the kernels.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime import processors
from runtime.errors import UserError

# What `host` gives: numpy, or the tensor of another device.
Logits = Tensor | NDArray[Any]
# Token ids and what is added to their logits.
LogitBias = Mapping[int, float] | tuple[tuple[int, float], ...]


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
    logit_bias           added to the logits of these token ids; given as a mapping, kept as sorted pairs.
    min_tokens           tokens before the text may end: until then its stop tokens have probability 0, and stop
                         strings do not count.

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
    logit_bias: LogitBias = ()
    min_tokens: int = 0

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
        whole = self.min_tokens >= 0 and self.min_tokens == int(self.min_tokens)
        self._require("min_tokens", whole, "0 (off) or a positive integer")
        self._require_bias()

    def _require_bias(self) -> None:
        bias = dict(self.logit_bias)
        for token, value in bias.items():
            if not isinstance(token, int) or token < 0 or not math.isfinite(value):
                raise UserError(
                    f"logit_bias must map token ids (0 or more) to finite numbers, but maps {token!r} to {value}; "
                    "change that entry."
                )
        # Pairs, so that equal descriptions are equal and a description can be a key.
        object.__setattr__(self, "logit_bias", tuple(sorted(bias.items())))

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

    @property
    def plain(self) -> bool:
        """Whether the most probable token is always that of the raw logits."""
        return not (self.penalised or self.logit_bias or self.min_tokens)


def require_known(sampling: Sampling, vocab_size: int) -> None:
    """Raises UserError for a logit bias on a token that the vocabulary does not have."""
    unknown = next((token for token in dict(sampling.logit_bias) if token >= vocab_size), None)
    if unknown is not None:
        raise UserError(
            f"logit_bias names token {unknown}, but the target's vocabulary has the ids 0 to {vocab_size - 1}; "
            "choose one of them."
        )


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
    tokens         the text before every row, prompt included; only read where the sampling is not `plain`.
    paths          n token lists, the draft tokens between the text and each row (None: none for any row).
    prompt_length  how many of `tokens` are the prompt.
    stop_tokens    what `min_tokens` keeps from coming too early.

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
    ) -> None:
        rows = host(logits)
        self._logits = rows[None] if rows.ndim == 1 else rows
        self._sampling = sampling
        self._paths = paths
        self._prompt_length = prompt_length
        self._generated = len(tokens) - prompt_length
        self._stop_tokens = stop_tokens
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

    def scores(self, row: int) -> NDArray[np.float64]:
        """(V,) float64 logits after bias and penalties.

        Raises UserError where `min_tokens` leaves no token that can be chosen.
        """
        logits, sampling = self._logits[row], self._sampling
        scores = np.array(host(logits.cpu() if isinstance(logits, Tensor) else logits), dtype=np.float64)
        path = self._paths[row] if self._paths is not None else ()
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


def probabilities(
    logits: Tensor,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    paths: Sequence[Sequence[int]] | None = None,
    prompt_length: int = 0,
    stop_tokens: Collection[int] = (),
) -> Tensor:
    """The rows' distributions: (n, V) logits to (n, V) float64, (V,) to (V,). Arguments as in `Distributions`."""
    rows = Distributions(logits, sampling, tokens, paths, prompt_length, stop_tokens)
    if logits.dim() == 1:
        return rows[0]
    return torch.stack([rows[i] for i in range(len(rows))]) if len(rows) else logits.to("cpu", torch.float64)


def greedy_choices(
    logits: Logits,
    sampling: Sampling,
    tokens: Sequence[int] = (),
    paths: Sequence[Sequence[int]] | None = None,
    prompt_length: int = 0,
    stop_tokens: Collection[int] = (),
) -> list[int]:
    """The most probable token of each of (n, V) rows after bias and penalties; the lowest id of equals."""
    if sampling.plain:
        return _largest(host(logits))[0]
    rows = Distributions(logits, sampling, tokens, paths, prompt_length, stop_tokens)
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
