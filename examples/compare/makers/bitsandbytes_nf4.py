"""An NF4 checkpoint as bitsandbytes saves it: `python -m makers.bitsandbytes_nf4 CHECKPOINT OUT`."""

import sys
from pathlib import Path


def make(checkpoint: Path, out: Path) -> None:
    """Blocks of 64 without double quantisation, the library's defaults; the head stays bfloat16, also its default."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config, dtype=torch.bfloat16)
    model.save_pretrained(out)  # before any forward: the first one lays the weights out anew


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
