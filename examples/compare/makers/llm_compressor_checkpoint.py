"""llm-compressor: `python -m makers.llm_compressor_checkpoint JOB.json`.

Its AWQ pins memory for a GPU whether or not there is one, and fails where there is none ("Cannot access accelerator
device when none is available"): on such a machine pin_memory returns its tensor as it is, in this process.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from makers.compression import Job, Stopwatch, serve

# Its pruning calls the head "lm_head.", which "lm_head" does not match: with that the head, and the embedding that is
# tied to it, would be pruned after all.
_HEAD = ["re:.*lm_head"]


def compress(job: Job, stopwatch: Stopwatch) -> Mapping[str, str]:
    """Everything that the setting does not name is the library's default."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.accelerator.is_available():
        setattr(torch.Tensor, "pin_memory", lambda self, *_, **__: self)  # noqa: B010
    windows = job.tokens()
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    examples = Dataset.from_dict({"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]})
    with stopwatch:
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=examples,
            recipe=modifiers(job.setting),
            max_seq_length=max(map(len, windows)),
            num_calibration_samples=len(windows),
            shuffle_calibration_samples=False,
        )
    model.save_pretrained(job.out, save_compressed=True)
    return {"version": f"llmcompressor {version('llmcompressor')}, torch {torch.__version__}"}


def modifiers(setting: Mapping[str, Any]) -> list[Any]:
    """The library's recipe for a setting. Raises ValueError for a method that it is not compared in."""
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from llmcompressor.modifiers.pruning.wanda import WandaPruningModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    method = setting["method"]
    integers = {"type": "int", "dynamic": False, "symmetric": setting["symmetric"], "num_bits": setting["bits"]}
    if method == "awq":
        weights = integers | {"strategy": "group", "group_size": setting["group_size"]}
        return [AWQModifier(), QuantizationModifier(config_groups={"group_0": _group(weights)}, ignore=_HEAD)]
    if method == "smoothquant":
        weights = integers | {"strategy": "channel"}
        # The largest value of the whole calibration set, not its default's moving average over windows.
        inputs = integers | {"strategy": "tensor", "observer": "static_minmax"}
        group = _group(weights) | {"input_activations": inputs}
        return [
            SmoothQuantModifier(smoothing_strength=setting["alpha"]),
            QuantizationModifier(config_groups={"group_0": group}, ignore=_HEAD),
        ]
    structure = {"sparsity": setting["sparsity"], "mask_structure": setting["pattern"] or "0:0", "ignore": _HEAD}
    if method == "sparsegpt":
        return [SparseGPTModifier(**structure, dampening_frac=setting["damping"])]
    if method == "wanda":
        return [WandaPruningModifier(**structure)]
    raise ValueError(f"llm-compressor is not compared in {method!r}")


def _group(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": dict(weights)}


if __name__ == "__main__":
    serve(compress)
