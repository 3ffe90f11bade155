"""From a text's tokens to what a client sees of it: the text as it grows, and its log-probabilities.

The text is a function of the tokens alone, worked out here and not in the engine's process: after that has died and
the text went on in another, nothing is shown twice and nothing is missing.
"""

from collections.abc import Sequence
from typing import Any

from runtime.sampling.detokenize import Detokenizer
from runtime.sampling.stopping import StopStrings
from runtime.serve.vocabulary import Vocabulary

# (token, logprob, rank, ((token, logprob), …)), as the engine's process sends it.
Scored = tuple[int, float, int, tuple[tuple[int, float], ...]]


class Text:
    """The new text of one request, as far as it may be shown."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        stop_tokens: frozenset[int],
        strings: Sequence[str] = (),
        min_tokens: int = 0,
        keep_stop: bool = False,
    ) -> None:
        self._stop_tokens = stop_tokens
        self._detokenizer = Detokenizer(vocabulary.tokenizer, prompt)
        self._strings = tuple(strings)
        self._watch = StopStrings(strings, self._detokenizer, min_tokens) if strings else None
        self._whole = Detokenizer(vocabulary.tokenizer, prompt) if strings and keep_stop else None
        self._seen = ""
        self._shown = ""

    def add(self, tokens: Sequence[int], last: bool) -> str:
        """The text that these tokens complete, without what ends it (or with it, where that was asked for)."""
        kept = list(tokens)
        if last and kept and kept[-1] in self._stop_tokens:
            kept.pop()
        if self._watch is None:
            return self._detokenizer.add(kept, last) if kept or last else ""
        if self._whole is not None:
            self._seen += self._whole.add(kept, last)
        if kept and not self._watch.found:
            self._watch.add(kept)
        fresh = self._watch.release(last)
        self._shown += fresh
        if last and self._whole is not None and self._watch.found:
            rest = self._seen[len(self._shown) :]
            ended = max((string for string in self._strings if rest.startswith(string)), key=len, default="")
            return fresh + ended
        return fresh


def completion_logprobs(
    vocabulary: Vocabulary, scored: Sequence[Scored | None], top: int, offset: int, tokens: Sequence[int]
) -> dict[str, Any]:
    """`logprobs` of /v1/completions for these tokens, the first of which begins at character `offset`.

    The chosen token is always among the top ones, with the same float; of two ids that read alike the likelier stays.
    An entry that is None (the first of a prompt, which follows nothing) is null.
    """
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, one in zip(tokens, scored, strict=True):
        name = vocabulary.shown(token)
        out["tokens"].append(name)
        out["text_offset"].append(offset)
        offset += len(name)
        if one is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        best: dict[str, float] = {}
        for id_, logprob in one[3][:top]:
            best.setdefault(vocabulary.shown(id_), finite(logprob))
        own = finite(one[1])
        best[name] = max(best.get(name, own), own)
        out["token_logprobs"].append(own)
        out["top_logprobs"].append(best)
    return out


def chat_logprobs(vocabulary: Vocabulary, scored: Sequence[Scored], top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat's answer for these tokens."""
    out = []
    for token, logprob, _, best in scored:
        listed = [_named(vocabulary, id_, value) for id_, value in best[:top]]
        if top and all(id_ != token for id_, _ in best[:top]):
            listed.append(_named(vocabulary, token, logprob))
        out.append(_named(vocabulary, token, logprob) | {"top_logprobs": listed})
    return out


def prompt_logprobs(vocabulary: Vocabulary, scored: Sequence[Scored | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt those of the top ones and its own, by id."""
    out: list[dict[str, Any] | None] = []
    for one in scored:
        if one is None:
            out.append(None)
            continue
        token, logprob, rank, best = one
        entry = {
            str(id_): {"logprob": finite(value), "rank": place, "decoded_token": vocabulary.shown(id_)}
            for place, (id_, value) in enumerate(best, 1)
        }
        entry[str(token)] = {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.shown(token)}
        out.append(entry)
    return out


def finite(logprob: float) -> float:
    """JSON has no −∞: a token that cannot come has the −9999 that OpenAI and vLLM give it."""
    return max(logprob, -9999.0)


def _named(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    data = vocabulary.bytes_of(token)
    return {"token": vocabulary.shown(token), "logprob": finite(logprob), "bytes": list(data)}
