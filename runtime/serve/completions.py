"""`/v1/completions`: its answer, whole or as a stream."""

import json
from typing import Any

from runtime.serve.errors import ApiError
from runtime.serve.protocol import CompletionRequest
from runtime.serve.run import Fresh, Progress, Run, round_shown
from runtime.serve.sse import DONE, error_event, event
from runtime.serve.texts import Scored, completion_logprobs, prompt_logprobs


def reason(finish: str | None) -> str | None:
    """OpenAI's word for why a text ended."""
    return "length" if finish == "cancelled" else finish


class Completion:
    """Gathers, or streams, the texts of one request."""

    def __init__(self, run: Run, request: CompletionRequest) -> None:
        self._run, self._plan, self._request = run, run.plan, request
        self._echo = bool(request.echo)
        self._offsets = [0] * len(run.texts)
        self._begun = [False] * len(run.texts)
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._each = bool(request.stream_options and request.stream_options.continuous_usage_stats)
        plan = run.plan
        head = {
            "id": plan.id,
            "object": "text_completion",
            "created": plan.created,
            "model": plan.served.name,
            "system_fingerprint": run.fingerprint,
        }
        self._head = head
        self._start = "data: " + json.dumps(head, separators=(",", ":"))[:-1] + ',"choices":[{"index":'
        self._plain_end = (
            ',"logprobs":null,"finish_reason":null}]' + (',"usage":null' if self._usage else "")
        ) + "}\n\n"
        # Neither log-probabilities nor ids nor rounds nor usage: then a chunk is a prefix, the text, and a suffix.
        ours = request.specpress
        self._plain = plan.top is None and not (request.return_token_ids or self._each or (ours and ours.rounds))

    def opening(self) -> bytes:
        """See sse.Writer."""
        return b""

    def delta(self, text: Progress, fresh: Fresh) -> bytes:
        """See sse.Writer."""
        place = text.place
        if self._plain and self._begun[place] and fresh.finish is None:
            if not fresh.text:
                return b""
            return f'{self._start}{place},"text":{json.dumps(fresh.text)}{self._plain_end}'.encode()
        choice = self._choice(text, fresh, not self._begun[place])
        choice["finish_reason"] = reason(fresh.finish)
        first = not any(self._begun)
        self._begun[place] = True
        chunk = self._head | {"choices": [choice]}
        if self._usage or self._each:
            chunk["usage"] = self._run.usage() if self._each else None
        if first:
            chunk["specpress"] = {"seed": self._plan.seed}
        return event(chunk)

    def closing(self) -> bytes:
        """See sse.Writer."""
        last = b""
        if self._usage:
            chunk = self._head | {"choices": [], "usage": self._run.usage()}
            last = event(chunk)
        return last + DONE

    def error(self, error: ApiError) -> bytes:
        """See sse.Writer."""
        return error_event(error)

    async def whole(self) -> dict[str, Any]:
        """The answer, when all texts have ended. Raises ApiError."""
        choices = []
        for text, whole in zip(self._run.texts, await self._run.whole(), strict=True):
            choice = self._choice(text, whole, True)
            choice["finish_reason"] = reason(whole.finish)
            choices.append(choice)
        ours = {"seed": self._plan.seed}
        return self._head | {"choices": choices, "usage": self._run.usage(), "specpress": ours}

    def _choice(self, text: Progress, fresh: Fresh, first: bool) -> dict[str, Any]:
        plan, request, shown = self._plan, self._request, fresh.text
        vocabulary, prompt = plan.served.vocabulary, plan.prompts[text.place // plan.n]
        listed: list[Scored | None] = list(fresh.scored)
        ids = list(fresh.tokens)
        if first and self._echo:
            shown = (
                vocabulary.tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                + shown
            )
            listed, ids = [*text.prompt_scored, *listed], [*prompt, *ids]
        choice: dict[str, Any] = {"index": text.place, "text": shown, "logprobs": None, "finish_reason": None}
        if plan.top is not None:
            offset = self._offsets[text.place]
            # After an engine's death the tokens that were there already have no figures from the new one.
            told = completion_logprobs(vocabulary, listed, plan.top, offset, ids[len(ids) - len(listed) :])
            choice["logprobs"] = told
            if ids:
                self._offsets[text.place] = (
                    told["text_offset"][-1] + len(told["tokens"][-1]) if told["tokens"] else offset
                )
        if request.return_token_ids:
            choice["token_ids"] = fresh.tokens
            if first:
                choice["prompt_token_ids"] = prompt
        if first and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(vocabulary, text.prompt_scored)
        if request.specpress is not None and request.specpress.rounds:
            choice["specpress"] = {"rounds": [round_shown(plan, event) for event in fresh.rounds]}
        return choice


def plan_top(request: CompletionRequest) -> tuple[int | None, int | None]:
    """(of new tokens, of the prompt's) the most probable ones to tell; None: nothing."""
    prompt = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt = max(request.logprobs, prompt or 0)
    return request.logprobs, prompt
