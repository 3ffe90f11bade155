"""From a request to what the engine is asked: tokens of prompts, sampling, stops, and what to tell of each text."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.sampling.stopping import Exactly
from runtime.serve.errors import invalid, refused
from runtime.serve.models import Served
from runtime.serve.protocol import Common, ResponseFormat, SpecpressOptions, StructuredOutputs
from runtime.serve.templates import joined
from runtime.serve.texts import Text

Structured = tuple[str, str, str]


@dataclass(frozen=True)
class Plan:
    """The texts of one request, prompt by prompt, `n` of each.

    asked    for each text, what the engine's process reads (engines.requested).
    seed     that the request named, or that was drawn for it.
    top      most probable tokens to tell of each new token; None: no log-probabilities.
    """

    served: Served
    prompts: list[list[int]]
    n: int
    asked: list[dict[str, Any]]
    seed: int
    stops: Exactly
    min_tokens: int
    keep_stop: bool
    top: int | None
    prediction: bool = False
    created: int = 0
    id: str = ""
    echo: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.prompts))

    def text(self, place: int) -> Text:
        """What turns the tokens of one of the texts into text."""
        prompt = self.prompts[place // self.n]
        vocabulary = self.served.vocabulary
        return Text(vocabulary, prompt, self.stops.tokens, self.stops.strings, self.min_tokens, self.keep_stop)


@dataclass(frozen=True)
class Wanted:
    """What an endpoint asks beyond the fields that all share; numbers as `RequestOptions` has them."""

    max_tokens: int | None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structured | None = None


def make_plan(
    served: Served, request: Common, prompts: list[list[int]], wanted: Wanted, created: int, id_: str
) -> Plan:
    """Raises ApiError for what the model or its cache cannot hold, and values that do not fit together."""
    context, n = served.about["context"], request.n or 1
    most = []
    for prompt in prompts:
        served.vocabulary.require_known(prompt, "prompt")
        most.append(_most(len(prompt), wanted.max_tokens, context))
    seed = secrets.randbits(32) if request.seed is None else request.seed % 2**64
    stops = _stops(served, request, wanted.structure is not None)
    options = _options(served, request, wanted)
    asked = []
    for prompt, room in zip(prompts, most, strict=True):
        for choice in range(n):
            asked.append(
                {
                    "prompt": prompt,
                    "max_new_tokens": room,
                    "sampling": _sampling(served, request, (seed + choice) % 2**64, room),
                    "stop": (sorted(stops.tokens), list(stops.strings)),
                    "options": options,
                    "structure": wanted.structure,
                }
            )
    return Plan(
        served=served,
        prompts=prompts,
        n=n,
        asked=asked,
        seed=seed,
        stops=stops,
        min_tokens=request.min_tokens or 0,
        keep_stop=bool(request.include_stop_str_in_output),
        top=wanted.logprobs,
        prediction=request.prediction is not None,
        created=created,
        id=id_,
    )


def _most(prompt: int, asked: int | None, context: int) -> int:
    """New tokens that there may be. Raises ApiError where the context does not hold them."""
    if prompt == 0:
        raise invalid("the prompt makes no token: give some text", "prompt")
    if prompt >= context:
        raise invalid(
            f"the prompt has {prompt} tokens, and the context of {context} needs room for a new one: shorten it",
            "prompt",
            "context_length_exceeded",
        )
    if asked is None:
        return context - prompt
    if prompt + asked > context:
        raise invalid(
            f"max_tokens: {asked} new tokens after a prompt of {prompt} exceed the context of {context}: ask for"
            f" at most {context - prompt}",
            "max_tokens",
            "context_length_exceeded",
        )
    return asked


def _sampling(served: Served, request: Common, seed: int, room: int) -> dict[str, Any]:
    defaults = served.vocabulary.defaults
    values: dict[str, Any] = {"seed": seed}
    for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = getattr(request, key)
        value = defaults.get(key) if value is None else value
        if value is not None:
            values[key] = max(0, int(value)) if key == "top_k" else value
    for key in ("presence_penalty", "frequency_penalty", "min_tokens"):
        if (value := getattr(request, key)) is not None:
            values[key] = value
    if request.logit_bias:
        bias = {int(key): value for key, value in request.logit_bias.items()}
        served.vocabulary.require_known(list(bias), "logit_bias")
        values["logit_bias"] = bias
    if (request.min_tokens or 0) > room:
        raise invalid(f"min_tokens must be at most max_tokens ({room}), but is {request.min_tokens}", "min_tokens")
    try:
        made = asdict(Sampling(**values))
    except UserError as error:
        raise refused(error) from None
    return made | {"logit_bias": tuple(made["logit_bias"])}


def _stops(served: Served, request: Common, structured: bool) -> Exactly:
    """What ends the text. A form ends with the model's end tokens, whatever `ignore_eos` says."""
    given = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    for text in given:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise invalid("stop holds half a character (a lone surrogate), which is no Unicode", "stop")
    ids = set(request.stop_token_ids or [])
    served.vocabulary.require_known(sorted(ids), "stop_token_ids")
    if structured or not request.ignore_eos:
        ids |= served.end_tokens
    special = served.vocabulary.special
    ids |= {special[text] for text in given if text in special}
    return Exactly(frozenset(ids), tuple(dict.fromkeys(text for text in given if text not in special)))


def _options(served: Served, request: Common, wanted: Wanted) -> dict[str, Any]:
    ours = request.specpress or SpecpressOptions()
    prediction: tuple[int, ...] = ()
    drafter = ours.drafter
    if request.prediction is not None:
        text = joined(request.prediction.content)
        prediction = tuple(served.vocabulary.encode(text, False, "prediction"))[: served.about["context"]]
        drafter = "prediction" if drafter is None else drafter
    if drafter is not None and drafter not in served.about["drafters"]:
        offered = ", ".join(served.about["drafters"])
        raise invalid(f"specpress.drafter must be one of {offered}, but is {drafter!r}", "specpress.drafter")
    return {
        "logprobs": wanted.logprobs,
        "prompt_logprobs": wanted.prompt_logprobs,
        "rounds": ours.rounds,
        "drafter": drafter,
        "draft_length": ours.draft_length,
        "verify": ours.verify,
        "cache_salt": request.cache_salt or "",
        "prediction": prediction,
    }


def structure_of(form: ResponseFormat | None, asked: StructuredOutputs | None) -> Structured | None:
    """The form that a text must have. Raises ApiError for one that no grammar can hold."""
    if asked is not None:
        return _structured(asked)
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return made_structure("json_object", None)
    assert form.json_schema is not None
    return made_structure("json_schema", form.json_schema.schema_)


def _structured(asked: StructuredOutputs) -> Structured:
    if asked.json_ is not None:
        schema: Any = asked.json_
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise invalid(
                    "structured_outputs.json must be a JSON schema, and is no JSON", "structured_outputs"
                ) from None
        return made_structure("json_schema", schema, asked.whitespace)
    if asked.json_object:
        return made_structure("json_object", None, asked.whitespace)
    if asked.regex is not None:
        return made_structure("regex", asked.regex)
    if asked.choice is not None:
        return made_structure("choice", asked.choice)
    return made_structure("lark", asked.grammar)


def made_structure(kind: str, value: Any, whitespace: Any = "compact") -> Structured:
    """A structure as the engine's process reads it. Raises ApiError naming what cannot be held."""
    from runtime.sampling.structure import Structure

    try:
        if kind == "json_object":
            made = Structure.json_object(whitespace)
        elif kind == "json_schema":
            made = Structure.json_schema(value, whitespace)
        else:
            made = getattr(Structure, kind)(value)
    except UserError as error:
        raise refused(error) from None
    return made.kind, made.text, made.whitespace


def token_prompts(served: Served, prompt: str | Sequence[Any], special: bool | None) -> list[list[int]]:
    """Each prompt of /v1/completions as tokens. Raises ApiError."""
    if isinstance(prompt, str):
        return [served.vocabulary.encode(prompt, special, "prompt")]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    return [served.vocabulary.encode(one, special, "prompt") if isinstance(one, str) else list(one) for one in prompt]
