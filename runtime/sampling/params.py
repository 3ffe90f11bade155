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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from runtime.errors import UserError

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

    @cached_property
    def greedy(self) -> bool:
        """Whether the choice is the argmax, without any randomness."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on the tokens before it other than through the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
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
