"""OpenVINO GenAI's speculative decoding as a function that `runtime.audit` tests, by token ids.

    make peers
    .venv/bin/python -m pip install openvino-genai==2026.4.1.0
    .venv/bin/python -m runtime.audit model known
    cd examples/compare
    for part in target draft; do
        ../../.peers/bin/python -m makers.openvino_model ../../known/$part ../../known/openvino/$part float16
    done
    cd ../..
    .venv/bin/python -m runtime.audit engine --callable examples.openvino_audit:engine --known known

The folder `known` is looked for where the command runs. What the engine computes is float32.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from runtime.audit.asks import Ask

MODELS = Path("known") / "openvino"
TOKENS = 4  # drafted a round
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


@cache
def pipeline(drafts: bool) -> Any:
    """The target with or without its draft, loaded once."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    more = {"draft_model": openvino_genai.draft_model(str(MODELS / "draft"), "CPU", **SETTINGS)} if drafts else {}
    return openvino_genai.LLMPipeline(str(MODELS / "target"), "CPU", scheduler_config=scheduler, **more, **SETTINGS)


def engine(asks: "Sequence[Ask]") -> list[Mapping[str, Any]]:
    """The protocol of `--callable`: one text after another, for the pipeline takes no batch with a draft."""
    import openvino
    import openvino_genai

    found: list[Mapping[str, Any]] = []
    for ask in asks:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = ask.new_tokens, True
        if ask.drafts:
            config.num_assistant_tokens = TOKENS
        if ask.temperature > 0:
            config.do_sample, config.temperature, config.rng_seed = True, ask.temperature, ask.seed
            config.top_p = ask.top_p
            if ask.top_k:
                config.top_k = ask.top_k
        ids = np.array([ask.prompt], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        found.append({"tokens": list(pipeline(ask.drafts).generate(inputs, config).tokens[0])})
    return found
