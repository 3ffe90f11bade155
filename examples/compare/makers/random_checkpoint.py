"""A transformers checkpoint of random bfloat16 weights: `python -m makers.random_checkpoint CONFIG.json OUT`."""

import json
import sys
from pathlib import Path


def make(config: Path, out: Path) -> None:
    """Weights as transformers initialises them, seeded; about 2 bytes of memory and of disk per weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = json.loads(config.read_text())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.bfloat16)
    model.save_pretrained(out)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
