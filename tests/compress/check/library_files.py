"""Checkpoints that the libraries write themselves, for test_libraries.py: a process of its own, which imports nothing
of ours.

python library_files.py KIND MODEL OUT TEXT.txt '{"…": …}'    KIND: gptqmodel, llmcompressor, bitsandbytes or llama_cpp
"""

import json
import sys
from pathlib import Path
from typing import Any

LENGTH, WINDOWS = 128, 16


def windows(model: Path, text: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(text.read_text(encoding="utf-8"))["input_ids"]
    return [tokens[i * LENGTH : (i + 1) * LENGTH] for i in range(WINDOWS)]


def gptqmodel(model: Path, out: Path, text: Path, said: dict[str, Any]) -> None:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import AWQConfig, GPTQConfig

    awq = said.pop("method", "gptq") == "awq"
    loaded = GPTQModel.load(str(model), AWQConfig(**said) if awq else GPTQConfig(**said), device="cpu")
    examples = [{"input_ids": window, "attention_mask": [1] * LENGTH} for window in windows(model, text)]
    loaded.quantize(examples, batch_size=1, backend=BACKEND.AWQ_TORCH if awq else BACKEND.AUTO)
    loaded.save(str(out))


def llmcompressor(model: Path, out: Path, text: Path, said: dict[str, Any]) -> None:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning.sparsegpt import SparseGPTModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]  # AWQ asks for a GPU
    head = ["re:.*lm_head"]
    made = {
        "rtn": lambda options: [QuantizationModifier(targets=["Linear"], ignore=head, **options)],
        "gptq": lambda options: [GPTQModifier(targets=["Linear"], ignore=head, **options)],
        "awq": lambda options: [AWQModifier(), QuantizationModifier(targets=["Linear"], ignore=head, **options)],
        "smoothquant": lambda options: [
            SmoothQuantModifier(smoothing_strength=0.8),
            GPTQModifier(targets=["Linear"], ignore=head, **options),
        ],
        "sparsegpt": lambda options: [SparseGPTModifier(ignore=head, **options)],
    }
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    ids = windows(model, text)
    oneshot(
        model=loaded,
        processor=AutoTokenizer.from_pretrained(model),
        dataset=Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * LENGTH] * WINDOWS}),
        recipe=made[said["method"]](said["options"]),
        max_seq_length=LENGTH,
        num_calibration_samples=WINDOWS,
    )
    loaded.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def bitsandbytes(model: Path, out: Path, text: Path, said: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype="auto", device_map="cpu", quantization_config=BitsAndBytesConfig(**said)
    )
    loaded.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def llama_cpp(model: Path, out: Path, text: Path, said: dict[str, Any]) -> None:
    """`model` is a GGUF file of floats; `kind` is a file type such as "Q4_K_M"."""
    import llama_cpp as library

    given = library.llama_model_quantize_default_params()
    given.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{said['kind']}")
    out.parent.mkdir(parents=True, exist_ok=True)
    failed = library.llama_model_quantize(str(model).encode(), str(out).encode(), given)
    if failed:
        raise SystemExit(f"llama_model_quantize: {failed}")


if __name__ == "__main__":
    kind, model, out, text, said = sys.argv[1:]
    makers = {f.__name__: f for f in (gptqmodel, llmcompressor, bitsandbytes, llama_cpp)}
    makers[kind](Path(model), Path(out), Path(text), json.loads(said))
