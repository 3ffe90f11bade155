"""Conversations in a source of text: lists of messages, checked before a model's chat template writes them."""

import json
from typing import Any

from calib.errors import UserError

# A row's field: [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …].
FIELD = "messages"


def checked(messages: Any, where: str) -> str:
    """One conversation as a document. Raises UserError for what is no list of messages, naming the message.

    Keys besides role and content (the thoughts before an answer, calls of tools) go to the template as they are, and
    so do contents in parts.
    """
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: expected a list of messages in {FIELD!r}, found {_shown(messages)}: correct it")
    for number, message in enumerate(messages, 1):
        at = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{at}: expected an object with role and content, found {_shown(message)}: correct it")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise UserError(f"{at}: expected a role such as user, found {_shown(message.get('role'))}: correct it")
        content = message.get("content")
        said = isinstance(content, str) or (isinstance(content, list) and all(isinstance(p, dict) for p in content))
        # An answer that only calls a tool says nothing.
        if not said and not (content is None and len(message) > 2):
            raise UserError(f"{at}: expected a text in content, found {_shown(content)}: correct it")
    return json.dumps(messages, ensure_ascii=False)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
