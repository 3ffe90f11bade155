"""What clients may send to /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runtime.serve.chat_protocol import Function
from runtime.serve.protocol import MOST_LOGPROBS, SpecpressOptions, Strict, Text, TextPart


class TextFormat(Strict):
    """`text.format` of /v1/responses."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """`text` of /v1/responses."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseTool(Function):
    """A function of /v1/responses, whose fields are not nested."""

    type: Literal["function"]


class ResponseToolChoice(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class InputItem(Strict):
    """A message, a call of a function, or its output."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[TextPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None

    @model_validator(mode="after")
    def _whole(self) -> "InputItem":
        needed = {"message": ("role", "content"), "function_call": ("name", "arguments")}
        for key in needed.get(self.type, ("call_id", "output")):
            if getattr(self, key) is None:
                raise ValueError(f"input: an item of type {self.type} needs {key}")
        return self


class ResponsesRequest(Strict):
    """`POST /v1/responses`, without anything that the server would have to remember."""

    model: str | None = None
    input: Text | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    specpress: SpecpressOptions | None = None

    @model_validator(mode="after")
    def _stateless(self) -> "ResponsesRequest":
        if self.store:
            raise ValueError("store: this server remembers no responses; leave it out, or set it to false")
        if self.previous_response_id is not None:
            raise ValueError("previous_response_id: this server remembers no responses; send the whole input")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools: give some, or leave it out")
        return self
