"""OpenVINO GenAI: `LLMPipeline`, plain, with a draft model or with prompt lookup."""

import numpy as np
import openvino as ov
import openvino_genai

from workers.generation import Options, serve
from workers.openvino_engine import properties

# The n-grams of the project's own prompt lookup sample.
_NGRAM = 3
# What its documentation gives as an example for draft lengths that follow the draft's confidence.
_CONFIDENCE = 0.4


class OpenVinoGenAi:
    """Compiled as the CPU plugin compiles by default: its own choice of precision for activations and cache."""

    def __init__(self, options: Options):
        self.options = options
        self.settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": options.threads}
        scheduler = openvino_genai.SchedulerConfig()
        # The same prompts come again in every round: they are to be read again, too.
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = options.positions
        extra: dict[str, object] = {}
        if options.drafter == "model":
            extra["draft_model"] = openvino_genai.draft_model(str(options.draft), "CPU", **self.settings)
        elif options.drafter == "lookup":
            extra["prompt_lookup"] = True
        self.pipeline = openvino_genai.LLMPipeline(
            str(options.target), "CPU", scheduler_config=scheduler, **extra, **self.settings
        )

    def describe(self) -> dict[str, str]:
        """What the plugin chooses for this graph and these settings."""
        core = ov.Core()
        compiled = core.compile_model(
            core.read_model(self.options.target / "openvino_model.xml"), "CPU", dict(self.settings)
        )
        facts = {"version": f"openvino-genai {openvino_genai.__version__}"}
        facts |= properties(compiled)
        if self.options.drafter == "lookup":
            facts["n-grams"] = f"up to {_NGRAM} tokens"
        if self.options.drafter == "model":
            facts["own schedule"] = f"assistant_confidence_threshold {_CONFIDENCE}"
        return facts

    def generate(self, prompt: list[int], new_tokens: int, draft_length: int | None) -> list[int]:
        """Either a number of assistant tokens or, without one, a threshold for the draft's confidence."""
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos = new_tokens, True
        if self.options.drafter != "none":
            if draft_length is None:
                settings.assistant_confidence_threshold = _CONFIDENCE
            else:
                settings.num_assistant_tokens = draft_length
        if self.options.drafter == "lookup":
            settings.max_ngram_size = _NGRAM
        ids = np.array([prompt], np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        return list(self.pipeline.generate(inputs, settings).tokens[0])


if __name__ == "__main__":
    serve(OpenVinoGenAi)
