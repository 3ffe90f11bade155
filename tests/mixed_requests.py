"""Requests of every kind to /v1/completions, and what of their answers depends on the request alone."""

import random
from typing import Any

from runtime.sampling.params import Sampling
from runtime.sampling.structure import Structure

PROMPTS = ("def read(path):\n", "import os\n", "class Table:\n", "for i in range(", "The value of", "return [", "x = {")
_SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
_LARK = 'start: "(" item ("," item)* ")"\nitem: /[a-z]{1,6}/ | start'
FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "pair", "strict": True, "schema": _SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"json": _SCHEMA, "whitespace": "pretty"}},
    {"structured_outputs": {"regex": r"[a-f]{2,6}(-[0-9]{2}){1,9}"}},
    {"structured_outputs": {"choice": ["the first of two answers", "the second of them"]}},
    {"structured_outputs": {"grammar": _LARK}},
)


def catalogue(count: int, seed: int) -> list[dict[str, Any]]:
    """Greedy and sampled, with stops, log-probabilities, forms, several choices and penalties."""
    generator = random.Random(seed)
    out = []
    for i in range(count):
        one: dict[str, Any] = {"prompt": generator.choice(PROMPTS) * generator.randrange(1, 5), "seed": i}
        one |= {"max_tokens": generator.randrange(8, 96), "temperature": generator.choice((0, 0, 0.7, 1.0))}
        if generator.random() < 0.2:
            one["stop"] = generator.sample(["return", "\n\n", "self", "#"], 2)
        if generator.random() < 0.2:
            one |= {"logprobs": generator.randrange(4), "echo": generator.random() < 0.5}
        if generator.random() < 0.2:
            one |= generator.choice(FORMS)
        if generator.random() < 0.15:
            one["n"] = generator.randrange(2, 4)
        if generator.random() < 0.15:
            one |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 4}
        if generator.random() < 0.15:
            one |= {"top_k": 40, "top_p": 0.9, "presence_penalty": 0.3, "logit_bias": {"11": -5, "300": 2.5}}
        if generator.random() < 0.1:
            one |= {"top_p": 0.95, "min_p": 0.02, "ignore_eos": True}
        out.append(one)
    return out


def told(choices: list[dict[str, Any]]) -> list[list[Any]]:
    """What of an answer must always be the same: text, log-probabilities, end, and token ids where they were asked."""
    return [[one["text"], one["logprobs"], one["finish_reason"], one.get("token_ids")] for one in choices]


def joined(events: list[dict[str, Any]], count: int) -> list[list[Any]]:
    """The same of a stream."""
    out: list[list[Any]] = [["", None, None, None] for _ in range(count)]
    for event in events:
        for choice in event["choices"]:
            found = out[choice["index"]]
            found[0] += choice["text"]
            found[2] = choice["finish_reason"] or found[2]
            if choice["logprobs"] is not None:
                found[1] = found[1] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    found[1][key] += values
            if "token_ids" in choice:
                found[3] = (found[3] or []) + choice["token_ids"]
    return out


def alone(speculator: Any, asked: dict[str, Any]) -> list[list[Any]]:
    """What `told` must give: by a Speculator of this process, one text after the other, nothing else beside them."""
    names = ("temperature", "top_k", "top_p", "min_p", "min_tokens", "logit_bias")
    values = {key: asked[key] for key in (*names, *(f"{kind}_penalty" for kind in _PENALTIES)) if key in asked}
    values["logit_bias"] = {int(key): value for key, value in values.get("logit_bias", {}).items()}
    stop: Any = asked.get("stop")
    form = _structure(asked)
    if asked.get("ignore_eos"):
        stop = _no_end(speculator, stop)
    top, echo = asked.get("logprobs"), bool(asked.get("echo"))
    out = []
    for choice in range(asked.get("n", 1)):
        sampling = Sampling(seed=asked["seed"] + choice, **values)
        options = {"logprobs": top, "prompt_logprobs": top if echo else None}
        result = speculator.generate([asked["prompt"]], asked["max_tokens"], sampling, stop, form, **options)[0]
        shown = (_read(speculator, result.prompt_tokens, True) if echo else "") + result.text
        scored = None if top is None else _scored(speculator, result, top, echo)
        out.append([shown, scored, result.finish, result.tokens if asked.get("return_token_ids") else None])
    return out


_PENALTIES = ("frequency", "presence", "repetition")


def _no_end(speculator: Any, strings: list[str] | None) -> Any:
    """These strings and no token."""
    from runtime.sampling.stopping import Exactly

    return Exactly(frozenset(), tuple(strings or ()))


def _structure(asked: dict[str, Any]) -> Structure | None:
    if (form := asked.get("response_format")) is not None:
        if form["type"] == "json_object":
            return Structure.json_object()
        return Structure.json_schema(form["json_schema"]["schema"])
    match asked.get("structured_outputs"):
        case {"json": schema, "whitespace": whitespace}:
            return Structure.json_schema(schema, whitespace)
        case {"regex": pattern}:
            return Structure.regex(pattern)
        case {"choice": choices}:
            return Structure.choice(choices)
        case {"grammar": grammar}:
            return Structure.lark(grammar)
    return None


def _read(speculator: Any, tokens: list[int], skip: bool = False) -> str:
    tokenizer = speculator.target.tokenizer
    text: str = tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def _scored(speculator: Any, result: Any, top: int, echo: bool) -> dict[str, list[Any]]:
    """Log-probabilities as OpenAI's completions have them."""
    each = [*(zip(result.prompt_tokens, result.prompt_logprobs, strict=True) if echo else ())]
    each += zip(result.tokens, result.logprobs, strict=True)
    out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, found in each:
        name = _read(speculator, [token])
        out["text_offset"].append(sum(map(len, out["tokens"])))
        out["tokens"].append(name)
        out["token_logprobs"].append(None if found is None else found.logprob)
        if found is None:
            out["top_logprobs"].append(None)
            continue
        best: dict[str, float] = {}
        for id_, logprob in [*found.top[:top], (token, found.logprob)]:
            shown = _read(speculator, [id_])
            best[shown] = max(logprob, best.get(shown, logprob))
        out["top_logprobs"].append(best)
    return out
