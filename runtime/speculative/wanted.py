"""What a request may ask for beside its text, and where it finds it: log-probabilities of tokens, and its rounds."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Wanted:
    """What to note down of a request. The defaults note nothing, and cost nothing.

    logprobs         of every token that the text gains: 0: the token's own; n: those of the n most probable, too.
    prompt_logprobs  the same for the tokens of the prompt. Their rows are read even where the cache knows the prompt.
    rounds           what each round drafted and accepted.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rounds: bool = False


class TokenLogprob(NamedTuple):
    """How probable the model found a token, as natural logarithms.

    logprob  float64 log-softmax of the model's logits as they are: before bias, penalties, temperature, truncations and
             a grammar's mask (vLLM's `raw_logprobs`).
    rank     1 for the most probable token, else 1 + how many tokens are more probable.
    top      (token, logprob) of the most probable ones, largest first, of equals the lower id first; the token itself
             only where it is one of them, and then with the same bits.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class RoundEvent(NamedTuple):
    """One round of one request.

    drafter    who drafted, "grammar" for tokens that the grammar forces; empty where nobody was asked.
    tokens, parents  the draft, as speculative.draft.Draft has it.
    path       the accepted ones, as indices among them.
    gained     the tokens that the text gained, in order: the accepted ones and the target's own, as far as it went on.
    draft_milliseconds, milliseconds  wall time of the round's drafting and of the whole round, for all its requests.
    """

    drafter: str
    tokens: list[int]
    parents: list[int]
    path: list[int]
    gained: list[int]
    draft_milliseconds: float
    milliseconds: float


@dataclass
class Found:
    """What was noted down of a request, as far as it is; the lists only grow.

    logprobs         one for each token that an engine added to the text, in order.
    prompt_logprobs  one for each token of the prompt; the first, which follows nothing, is None. Whole before the text
                     gains a token.
    rounds           one for each round that the text was part of, but for those that read its prompt.
    """

    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    rounds: list[RoundEvent] = field(default_factory=list)
