"""Conversations as prompts: the tokenizer's chat template, in transformers' sandbox."""

import json
from collections.abc import Sequence
from typing import Any

from runtime.serve.chat_protocol import ChatRequest, Message
from runtime.serve.errors import invalid
from runtime.serve.protocol import TextPart
from runtime.serve.responses_protocol import InputItem, ResponsesRequest
from runtime.serve.vocabulary import Vocabulary

_LONGEST = 300  # characters of what a template says


def render(
    vocabulary: Vocabulary,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    extra: dict[str, Any] | None = None,
    generation: bool = True,
) -> str:
    """The conversation as the model reads it.

    extra       what else the template is told.
    generation  end where the answer begins.

    Raises ApiError where there is no template, it does not take tools, or it refuses the messages.
    """
    template = vocabulary.tokenizer.chat_template
    if not template:
        raise invalid(
            "this model's tokenizer has no chat template: ask /v1/completions, or start the server with"
            " --chat-template FILE",
            "messages",
        )
    if tools and "tools" not in str(template):
        raise invalid("this model's chat template takes no tools: leave them out", "tools")
    reserved = {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "conversation"}
    if wrong := reserved & set(extra or {}):
        raise invalid(f"chat_template_kwargs may not set {min(wrong)}", "chat_template_kwargs")
    try:
        text: str = vocabulary.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) if tools else None,
            add_generation_prompt=generation,
            tokenize=False,
            **(extra or {}),
        )
    except MemoryError:
        raise
    except Exception as error:
        # A template is somebody's program; what it raises for messages that it does not take can be anything.
        said = " ".join(str(error).split())[:_LONGEST].rstrip(".")
        raise invalid(f"the chat template refuses these messages: {said}", "messages") from None
    return text


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: texts joined, arguments of calls as objects, nothing that is absent."""
    out = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": joined(message.content)}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, key)) is not None:
                one[key] = value
        if message.tool_calls:
            one["tool_calls"] = [
                {"id": call.id, "type": "function", "function": _called(call.function.name, call.function.arguments)}
                for call in message.tool_calls
            ]
        out.append(one)
    return out


def response_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input of /v1/responses as a conversation."""
    out: list[dict[str, Any]] = []
    if request.instructions is not None:
        out.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*out, {"role": "user", "content": request.input}]
    return [*out, *(_item(item) for item in request.input)]


def _item(item: InputItem) -> dict[str, Any]:
    if item.type == "message":
        return {"role": item.role, "content": joined(item.content)}
    if item.type == "function_call":
        call = {"id": item.call_id, "type": "function", "function": _called(str(item.name), str(item.arguments))}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)}


def joined(content: str | list[TextPart] | None) -> str:
    """A message's text."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def chat_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools as templates expect them."""
    return [tool.model_dump(exclude_none=True) for tool in request.tools or []]


def _called(name: str, arguments: str) -> dict[str, Any]:
    try:
        return {"name": name, "arguments": json.loads(arguments)}
    except ValueError:
        raise invalid("tool_calls: the arguments of a call must be JSON", "messages") from None
