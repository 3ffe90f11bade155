"""What clients may send of conversations: messages, tools, and the requests that hold them."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from runtime.serve.protocol import MOST_LOGPROBS, Common, Strict, TextPart


class FunctionCall(Strict):
    """A call that the assistant made: the name, and the arguments as JSON in a text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    type: Literal["message", "text"] | None = None  # lm-eval says text
    # What OpenAI's clients send back of an answer, always null here.
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _said(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"messages: a message of the role {self.role} needs content")
        return self


class Function(Strict):
    """What a tool is called with."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may ask for."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A tool's name."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _chat(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: set logprobs to true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: leave out one of them")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice needs tools: give some, or leave it out")
        return self


class TokenizeRequest(Strict):
    """`POST /tokenize`: a prompt, or a conversation by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages is needed")
        return self
