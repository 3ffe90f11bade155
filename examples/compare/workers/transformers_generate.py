"""transformers: `generate` in float32, plain, with an assistant model or with prompt lookup."""

import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from workers.generation import Options, serve


class Transformers:
    """Eager, with the library's dynamic cache: what assisted generation asks for."""

    loading: ClassVar[dict[str, Any]] = {"dtype": torch.float32}

    def __init__(self, options: Options):
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(options.threads)
        self.drafter = options.drafter
        self.model = self.load(options.target)
        self.assistant = self.load(options.draft) if options.drafter == "model" else None
        # Calls may write to the assistant's settings, and each begins with those that were loaded.
        self.schedule = copy.deepcopy(self.assistant.generation_config) if self.assistant is not None else None

    def describe(self) -> dict[str, str]:
        """Versions and precision."""
        return {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "precision": str(self.model.dtype).removeprefix("torch."),
            "cache": "dynamic",
            "threads": str(torch.get_num_threads()),
        }

    @torch.inference_mode()
    def generate(self, prompt: list[int], new_tokens: int, draft_length: int | None) -> list[int]:
        """A fixed draft length switches the assistant's schedule and confidence threshold off."""
        extra: dict[str, Any] = {}
        if self.assistant is not None and self.schedule is not None:
            settings = copy.deepcopy(self.schedule)
            if draft_length is not None:
                settings.num_assistant_tokens = draft_length
                settings.num_assistant_tokens_schedule = "constant"
                settings.assistant_confidence_threshold = 0.0
            self.assistant.generation_config = settings
            extra["assistant_model"] = self.assistant
        elif self.drafter == "lookup":
            extra["prompt_lookup_num_tokens"] = draft_length
        ids = torch.tensor([prompt])
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, **extra
        )
        return out[0, len(prompt) :].tolist()

    def load(self, path: Path) -> PreTrainedModel:
        """Without an end token, so that every text has the same length."""
        model = AutoModelForCausalLM.from_pretrained(path, **self.loading).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model


if __name__ == "__main__":
    serve(Transformers)
