"""Whether Play's coloured tokens are those that the engine counted."""

import json
import time
from collections.abc import Callable
from typing import Any

from tests.serving import Running

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["function", "class", "method"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
)
_FIGURES = {
    "tokens": "vllm:generation_tokens_total",
    "texts": "vllm:request_success_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "forced": "specpress:grammar_forced_tokens_total",
}


def figures(server: Running, model: str = "pair") -> dict[str, int]:
    """The engine's counts of a model so far."""
    return {key: int(server.metric(name, model_name=model)) for key, name in _FIGURES.items()}


def same_counts(server: Running, write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `write` shows, after it was compared with what the engine counted meanwhile."""
    before = figures(server)
    shown = write()
    server.wait_idle()
    end = time.monotonic() + 10
    while (after := figures(server))["texts"] == before["texts"] and time.monotonic() < end:
        time.sleep(0.02)
    counted = {key: after[key] - before[key] for key in after}
    assert counted["texts"] == 1
    assert shown["tokens"] == counted["tokens"]
    assert shown["accepted"] + shown["forced"] == counted["accepted"]
    assert shown["own"] == counted["tokens"] - counted["accepted"]
    assert shown["ghosts"] == counted["drafted"] - counted["accepted"]
    assert shown["forced"] <= counted["forced"]
    return shown
