"""What clients may send: OpenAI's fields by OpenAI's names, vLLM's names for what goes beyond, ours under `specpress`.

Types are strict, and unknown fields are errors (bodies.py). A field that OpenAI has and this server does not do is
declared, so that its error says so.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MOST_LOGPROBS = 20
MOST_CHOICES = 16
MOST_STOPS = 16
MOST_PROMPTS = 256

Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Strict(BaseModel):
    """Takes what it says and nothing else: no number from a text, no NaN, no field that it does not have."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    """What a stream tells besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SpecpressOptions(Strict):
    """How a text is decoded. Nothing here changes what is written, except `verify`, which changes what a seed gives.

    drafter       who proposes tokens, by name; "none": plain decoding.
    draft_length  the most tokens drafted a round.
    verify        the rule for sampled proposals.
    rounds        tell of each round what was drafted, accepted and rejected.
    """

    drafter: Annotated[str, Field(max_length=64)] | None = None
    draft_length: Annotated[int, Field(ge=0, le=64)] | None = None
    verify: Literal["coupled", "rejection"] | None = None
    rounds: bool = False


class JsonSchema(Strict):
    """OpenAI's `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format of type json_schema needs json_schema, and no other type has one")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise ValueError("response_format.json_schema needs a schema")
        return self


class StructuredOutputs(Strict):
    """vLLM's field for the same and more: exactly one of the first five."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None
    whitespace: Literal["compact", "pretty"] = "compact"

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        given = [self.json_, self.json_object, self.regex, self.choice, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise ValueError("structured_outputs needs exactly one of json, json_object, regex, choice and grammar")
        return self


class Prediction(Strict):
    """OpenAI's predicted output: a text that the answer will mostly repeat."""

    type: Literal["content"]
    content: "str | Annotated[list[TextPart], Field(min_length=1)]"


class TextPart(Strict):
    """A part of a message; pictures and sound are not taken."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


class Common(Strict):
    """What completions and chats share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    # vLLM's names.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    specpress: SpecpressOptions | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        wrong = next((key for key in value or {} if not (key.isascii() and key.isdecimal() and len(key) < 12)), None)
        if wrong is not None:
            raise ValueError(f"logit_bias maps token ids to numbers, and {wrong[:40]!r} is no token id")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "Common":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: leave it out, or set stream")
        form = self.response_format is not None and self.response_format.type != "text"
        if form and self.structured_outputs is not None:
            raise ValueError("response_format and structured_outputs ask for two forms: leave out one of them")
        return self


class CompletionRequest(Common):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _offered(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not offered: leave it out, and take n for several texts")
        if self.suffix is not None:
            raise ValueError("suffix is not offered: leave it out")
        return self


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class CompareRequest(Strict):
    """`POST /compare`, for the page: a text on which a model's predictions are compared with the original's."""

    model: str | None = None
    text: Text


class LoadRequest(Strict):
    """`POST /admin/models/load`: a further model, or another one under a name that is served already."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}$")]
    path: Text
    draft: Text | None = None
    drafter: Annotated[str, Field(max_length=64)] | None = None
    draft_length: Annotated[int, Field(ge=0, le=64)] | None = None


class UnloadRequest(Strict):
    """`POST /admin/models/unload`."""

    name: Text
