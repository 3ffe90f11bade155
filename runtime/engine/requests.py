"""From what a user asks to a request that an engine runs, and from a request's tokens to the text that is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from runtime.contract import Loaded
from runtime.errors import UserError
from runtime.sampling.detokenize import Detokenizer, encode
from runtime.sampling.grammar import Grammar
from runtime.sampling.params import Sampling, require_known
from runtime.sampling.stopping import Stop, StopStrings, kept, resolve
from runtime.speculative.draft import NOTHING_WANTED, Request, Rule
from runtime.speculative.wanted import Wanted

MAX_DRAFT_LENGTH = 64


@dataclass(frozen=True)
class RequestOptions:
    """What a request may ask for beside its sampling and its stops. The defaults ask for nothing.

    logprobs         log-probabilities of the tokens that it gains: 0: their own; n: the n most probable ones', too.
    prompt_logprobs  the same for the tokens of its prompt.
    rounds           what each round drafted and accepted.
    drafter          the name of one of the engine's drafters; None: its default; "none": plain decoding.
    draft_length     the most tokens drafted a round, 0 to 64; None: as the engine has it.
    verify           the rule for its drafts where it samples; None: the engine's.
    cache_salt       it shares cached prefixes only with requests of the same.
    prediction       tokens that its text is expected to hold, for the drafter `prediction`.

    Raises UserError for numbers out of range and an unknown rule.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rounds: bool = False
    drafter: str | None = None
    draft_length: int | None = None
    verify: Rule | None = None
    cache_salt: str = ""
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, key)) is not None and value < 0:
                raise UserError(f"{key} must be 0 (the token's own) or more, but is {value}; choose a larger number.")
        if self.draft_length is not None:
            require_draft_length(self.draft_length)
        if self.verify is not None:
            require_rule(self.verify)

    @property
    def wanted(self) -> Wanted:
        """What is to be noted down."""
        asked = Wanted(self.logprobs, self.prompt_logprobs, self.rounds)
        return NOTHING_WANTED if asked == NOTHING_WANTED else asked


NO_OPTIONS = RequestOptions()


def require_draft_length(length: int) -> None:
    """Raises UserError for a γ out of range."""
    if not 0 <= length <= MAX_DRAFT_LENGTH:
        raise UserError(f"draft_length must be from 0 to {MAX_DRAFT_LENGTH}, but is {length}; choose another.")


def require_rule(rule: Rule) -> None:
    """Raises UserError for an unknown rule."""
    if rule not in get_args(Rule):
        raise UserError(f"verify must be one of {', '.join(get_args(Rule))}, but is {rule!r}; choose one of them.")


def make_request(
    target: Loaded,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Stop | None = None,
    options: RequestOptions = NO_OPTIONS,
    *,
    id: int,
    grammar: Grammar | None = None,
    resumed: Sequence[int] = (),
) -> Request:
    """A request for an engine of this target.

    max_new_tokens  0: the prompt is only read, for the log-probabilities of its tokens.
    stop            token ids and texts that end the text; None: the model's own ids; (): none.
    id              unlike that of any other live request.
    grammar         what the text must keep to, compiled for this target. The model's end tokens end such a text,
                    whatever `stop` is; others that do may do so anywhere.
    resumed         new tokens that the text has already; they count to max_new_tokens. It goes on as it would have if
                    it had just gained them: greedy and `coupled` texts then end in the same tokens. If they have ended
                    it, the request is finished.

    Raises UserError for an empty prompt, one that leaves no position for a new token, and values out of range.
    """
    if sampling.min_tokens > max_new_tokens:
        raise UserError(
            f"min_tokens must be at most max_new_tokens ({max_new_tokens}), but is {sampling.min_tokens}; "
            "change one of the two."
        )
    decoder, tokenizer = target.decoder, target.tokenizer
    require_known(sampling, decoder.vocab_size)
    tokens = encode(tokenizer, prompt, decoder)
    stop_tokens, strings = resolve(stop, target, decoder.vocab_size)
    if (wrong := next((token for token in resumed if not 0 <= token < decoder.vocab_size), None)) is not None:
        raise UserError(f"the text to go on with holds token {wrong}, which the target's vocabulary does not have.")
    request = Request(
        id=id,
        tokens=tokens,
        prompt_length=len(tokens),
        sampling=sampling,
        max_new_tokens=min(max_new_tokens, decoder.max_positions - len(tokens)),
        stop_tokens=stop_tokens if grammar is None else stop_tokens.union(grammar.ends),
        stop_strings=StopStrings(strings, Detokenizer(tokenizer, tokens), sampling.min_tokens) if strings else None,
        wanted=options.wanted,
        drafter=options.drafter,
        draft_length=options.draft_length,
        rule=options.verify,
        cache_salt=options.cache_salt,
        prediction=options.prediction,
        grammar=None if grammar is None else grammar.matcher(),
    )
    if resumed:
        _resume(request, resumed)
    return request


def _resume(request: Request, tokens: Sequence[int]) -> None:
    """Gives a new request the tokens that it had gained elsewhere."""
    count, stopped = kept(tokens, request.stop_tokens, request.stop_strings)
    request.tokens += tokens[:count]
    if request.grammar is not None:
        request.grammar.advance(list(tokens[:count]))
    request.finished = stopped or request.missing <= 0


def finish_reason(request: Request) -> Literal["stop", "length", "error"]:
    """What ended a request: a stop token or string, its number of tokens, or an error."""
    if request.error is not None:
        return "error"
    return "stop" if request.stopped else "length"


def shown(request: Request, detokenizer: Detokenizer, tokens: list[int]) -> str:
    """The text that a request's latest tokens complete, without what ended the text."""
    if request.stop_strings is not None:
        return request.stop_strings.release(last=request.finished)
    if request.ends_with_stop_token:
        tokens = tokens[:-1]
    return detokenizer.add(tokens, last=request.finished)
