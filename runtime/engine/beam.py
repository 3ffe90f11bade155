"""Beam search: the texts of highest probability that a breadth-first search of bounded width finds.

The rules are those of transformers' `generate(num_beams=…)`, so that the same model gives the same beams: a hypothesis
is finished by a stop token only if it is among the `beams` best continuations of its step, finished hypotheses compete
by their sum of log-probabilities / length ** length_penalty, and the length counts the stop token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from runtime.contract import Cache, Decoder, Rows, integers
from runtime.errors import UserError
from runtime.sampling.candidates import largest
from runtime.sampling.detokenize import Detokenizer, encode
from runtime.sampling.distribution import argmax_tokens
from runtime.sampling.stopping import resolve
from runtime.speculative.drafters.model import prefill

if TYPE_CHECKING:
    from runtime.model.load import Model

MAX_BEAMS = 64
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """One finished hypothesis: its new tokens, their text without a stop token, and its score (higher is better)."""

    tokens: list[int]
    text: str
    score: float


class Rules(NamedTuple):
    """What `beam_search` is told, checked; `limit` ≥ 1 is the most new tokens."""

    beams: int
    limit: int
    length_penalty: float
    early_stopping: EarlyStopping
    stops: frozenset[int]


@dataclass(frozen=True)
class Hypothesis:
    """New tokens and the sum of their log-probabilities; `parent`: the running hypothesis (an index) it continues."""

    tokens: tuple[int, ...] = ()
    total: float = 0.0
    parent: int = 0


def beam_search(
    model: "Model",
    prompt: str | Sequence[int],
    beams: int = 4,
    max_new_tokens: int = 128,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    stop: Sequence[int] | None = None,
) -> list[Beam]:
    """The best `beams` continuations that were found, best first; fewer where the vocabulary has no more.

    length_penalty  the power of the length that a sum of log-probabilities is divided by: above 0 for longer texts.
    early_stopping  True: end as soon as `beams` hypotheses are finished; False: as soon as the best running one, at its
                    present length, is worse than all of them; "never": only when no length that it can reach helps.
    stop            token ids that end a hypothesis; None: the model's own; (): none.

    All running hypotheses share one forward a step. Raises UserError for an empty or too long prompt, for values out
    of range and for logits that are not finite.
    """
    if not 1 <= beams <= MAX_BEAMS:
        raise UserError(f"beams must be from 1 to {MAX_BEAMS}, but is {beams}; choose another number.")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens must be at least 1, but is {max_new_tokens}; choose a larger number.")
    if not math.isfinite(length_penalty):
        raise UserError(f"length_penalty must be a finite number, but is {length_penalty}; choose one, such as 1.")
    if early_stopping not in (True, False, "never"):
        raise UserError(f"early_stopping must be True, False or 'never', but is {early_stopping!r}; choose one.")
    if stop is not None and not all(isinstance(token, int) for token in stop):
        raise UserError(f"beam search stops at token ids only, but stop is {list(stop)!r}; leave out the texts.")
    decoder, tokenizer = model.decoder, model.tokenizer
    tokens = encode(tokenizer, prompt, decoder)
    stops, _ = resolve(stop, model, decoder.vocab_size)
    limit = min(max_new_tokens, decoder.max_positions - len(tokens))
    found = []
    for one in search(decoder, tokens, Rules(beams, limit, length_penalty, early_stopping, stops)):
        shown = one.tokens[:-1] if one.tokens[-1] in stops else one.tokens
        text = Detokenizer(tokenizer, tokens).add(shown, last=True)
        found.append(Beam(list(one.tokens), text, score(one, length_penalty)))
    return found


def score(hypothesis: Hypothesis, length_penalty: float) -> float:
    """The sum of log-probabilities over length ** length_penalty; the length is that of the new tokens."""
    return hypothesis.total / len(hypothesis.tokens) ** length_penalty


def search(decoder: Decoder, prompt: Sequence[int], rules: Rules) -> list[Hypothesis]:
    """`beam_search` over token ids. Frees its cache."""
    beams, limit, length_penalty, _, stops = rules
    cache = decoder.new_cache()
    handles = [cache.open(len(prompt) + limit)]
    try:
        fed = prefill(decoder, cache, handles[0], prompt, 0)
        rows, last_row = Rows.chains([(handles[0], fed, len(prompt) - fed)]), integers([len(prompt) - fed - 1])
        logits = decoder.forward(integers(prompt[fed:]), rows, cache, last_row).logits
        running, finished = [Hypothesis()], list[Hypothesis]()
        while True:
            # So many that `beams` of them go on, even if every running hypothesis has all stop tokens among them.
            count = max(2, 1 + len(stops)) * beams
            candidates = continuations(running, log_probabilities(logits), count)
            last = len(candidates[0].tokens) == limit
            ends = [last or one.tokens[-1] in stops for one in candidates]
            finished += [one for one, end in zip(candidates[:beams], ends, strict=False) if end]
            finished = sorted(finished, key=lambda one: -score(one, length_penalty))[:beams]
            running = [one for one, end in zip(candidates, ends, strict=True) if not end][:beams]
            if not running or is_done(running[0], finished, rules):
                return finished
            _follow(cache, handles, [one.parent for one in running])
            position = len(prompt) + len(running[0].tokens) - 1
            rows = Rows.chains([(handle, position, 1) for handle in handles])
            logits = decoder.forward(integers([one.tokens[-1] for one in running]), rows, cache).logits
    finally:
        for handle in handles:
            cache.close(handle)


def continuations(running: Sequence[Hypothesis], rows: NDArray[np.float64], count: int) -> list[Hypothesis]:
    """The best `count` of all hypotheses that are one token longer, best first; of equals the lower parent and id.

    rows  (n, V) log-probabilities of the tokens after each running hypothesis; −inf never continues one.
    """
    totals = (rows + np.array([one.total for one in running])[:, None]).ravel()
    found = []
    for at in largest(totals, count):
        parent, token = divmod(at, rows.shape[1])
        found.append(Hypothesis((*running[parent].tokens, token), float(totals[at]), parent))
    return found


def is_done(best: Hypothesis, finished: Sequence[Hypothesis], rules: Rules) -> bool:
    """Whether the search ends with these finished hypotheses, best first, while `best` is the best running one."""
    if len(finished) < rules.beams:
        return False
    if rules.early_stopping is True:
        return True
    length = rules.limit if rules.early_stopping == "never" and rules.length_penalty > 0 else len(best.tokens)
    return best.total / length**rules.length_penalty <= score(finished[-1], rules.length_penalty)


def log_probabilities(logits: Tensor) -> NDArray[np.float64]:
    """(n, V) logits to (n, V) float64 log-softmax. Raises UserError where a row has a NaN or an infinity."""
    argmax_tokens(logits, "target")
    rows = logits.to("cpu").double().numpy()
    rows = rows - rows.max(axis=-1, keepdims=True)
    normalised: NDArray[np.float64] = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return normalised


def _follow(cache: Cache, handles: list[int], parents: Sequence[int]) -> None:
    """Changes the running hypotheses' handles in place to those of the next ones, each the continuation of a parent."""
    before = list(handles)
    for index, handle in enumerate(before):
        if index not in parents:
            handles.remove(handle)
            cache.close(handle)
    following: list[int] = []
    for parent in parents:
        # The first child goes on in its parent's cache, every other one in a copy. Noted at once, so that an error in
        # between frees all of them.
        handle = before[parent]
        if handle in following:
            handle = cache.fork(handle)
            handles.append(handle)
        following.append(handle)
    handles[:] = following
