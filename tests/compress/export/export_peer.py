"""What the compressors' environment does for test_peers.py: a process of its own, which imports nothing of ours.

python export_peer.py read MODEL OUT.safetensors DTYPE     transformers: dequantised weights, and logits
python export_peer.py write MODEL OUT '{"method": …}'      GPTQModel: compresses and saves
python export_peer.py oneshot MODEL OUT '{"scheme": …}'    llm-compressor: the same
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def tokens() -> torch.Tensor:
    """The text that both sides put in: (1, 48)."""
    return torch.randint(1, 320, (1, 48), generator=torch.Generator().manual_seed(7))


def dense(module: Any) -> torch.Tensor | None:
    """A packed layer's weight (N, K) as its library has it; None for other modules."""
    if type(module).__name__.lower().find("awq") >= 0:
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        size = module.in_features if module.group_size == -1 else module.group_size
        return dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, size).T
    return module.dequantize_weight().T if hasattr(module, "dequantize_weight") else None


def read(model: Path, out: Path, dtype: str) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), device_map="cpu").eval()
    found = {
        name: weight.float().contiguous()
        for name, module in loaded.named_modules()
        if (weight := dense(module)) is not None
    }
    with torch.no_grad():
        found["logits"] = loaded(tokens()).logits[0].float().contiguous()
    save_file(found, out)


def write(model: Path, out: Path, said: dict[str, Any]) -> None:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import AWQConfig, GPTQConfig

    awq = said.pop("method") == "awq"
    config = AWQConfig(**said) if awq else GPTQConfig(**said)
    loaded = GPTQModel.load(str(model), config, device="cpu")
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(1, 320, (64,), generator=generator).tolist() for _ in range(8)]
    examples = [{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts]
    loaded.quantize(examples, batch_size=1, backend=BACKEND.AWQ_TORCH if awq else BACKEND.AUTO)
    loaded.save(str(out))


def oneshot(model: Path, out: Path, said: dict[str, Any]) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(1, 320, (8, 64), generator=generator)
    modifier = {"gptq": GPTQModifier, "rtn": QuantizationModifier}[said["method"]]
    oneshot(
        model=loaded,
        dataset=Dataset.from_dict({"input_ids": texts.tolist(), "attention_mask": torch.ones_like(texts).tolist()}),
        recipe=[modifier(targets=["Linear"], ignore=["re:.*lm_head"], **said["options"])],
        max_seq_length=64,
        num_calibration_samples=8,
    )
    loaded.save_pretrained(out, save_compressed=True)


def read_dense(model: Path, out: Path, dtype: str) -> None:
    """compressed-tensors' own decompression, of the weights of all blocks."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    config = CompressedTensorsConfig(run_compressed=False)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), quantization_config=config).eval()
    layers = {n: m for n, m in loaded.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    found = {name: layer.weight.detach().float().contiguous() for name, layer in layers.items()}
    with torch.no_grad():
        found["logits"] = loaded(tokens()).logits[0].float().contiguous()
    save_file(found, out)


if __name__ == "__main__":
    what, model, out, last = sys.argv[1:]
    if what in ("read", "dense"):
        {"read": read, "dense": read_dense}[what](Path(model), Path(out), last)
    else:
        {"write": write, "oneshot": oneshot}[what](Path(model), Path(out), json.loads(last))
