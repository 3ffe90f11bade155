"""Writes a trained model as a Hugging Face directory with its model card."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig

_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [code, python, specpress]
---

# {title}

A Llama-architecture language model of Python source: {parameters:,} parameters, {layers} layers, hidden {hidden}, MLP
{mlp}, byte-level BPE of {vocabulary:,} entries, {positions:,} positions, bfloat16. It exists so that compression and
speculative decoding can be tried and measured without downloading anything; it is no use as a programming assistant.

| | bits per byte | perplexity per token | tokens |
|---|---|---|---|
| held-out standard library | {library[bits_per_byte]} | {library[perplexity]} | {library[tokens]:,} |
| held-out packages | {others[bits_per_byte]} | {others[perplexity]} | {others[tokens]:,} |

Windows of {positions:,} tokens without overlap, `python examples/pair/train.py evaluate`.

## Training

{training}

`examples/pair/train.py` in the Specpress repository is the whole procedure.

## Data

Python source only: the standard library of Python {interpreter} ({library_megabytes:.1f} MB) and installed packages
whose metadata states an MIT, BSD, Apache or PSF licence ({packages_megabytes:.0f} MB), without tests, generated files
and vendored copies. One file in ten, chosen by the hash of its path, is held out; {leaks:,} training files that share
text with a held-out one and {copies:,} copies of other training files were dropped. SHA-256 of the corpus:
`{sha256}`.

Packages: {packages}.

## Licence

Apache-2.0, as the rest of the repository.
"""


def write_model(work: Path, source: str, config: LlamaConfig, out: Path, held_out: dict[str, Any]) -> None:
    """Copies work/`source`.safetensors, the configuration, the tokenizer and a card into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    config.architectures, config.dtype, config.use_cache = ["LlamaForCausalLM"], "bfloat16", True
    config.save_pretrained(out)
    GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(out)
    shutil.copyfile(work / f"{source}.safetensors", out / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work / "tokenizer" / name, out / name)
    parameters = sum(t.numel() for t in load_file(out / "model.safetensors").values())
    data = json.loads((work / "corpus.json").read_text())
    card = _CARD.format(
        title=f"Specpress pair: {out.name}",
        parameters=parameters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        library=held_out["held_library"],
        others=held_out["held_packages"],
        training=_training(work, source),
        interpreter=data["interpreter"],
        library_megabytes=data["sizes"]["library"]["megabytes"],
        packages_megabytes=data["sizes"]["packages"]["megabytes"],
        leaks=data["left_out"]["copies of held-out text"],
        copies=data["left_out"]["copies of other files"],
        sha256=data["sha256"],
        packages=", ".join(data["packages"]),
    )
    (out / "README.md").write_text(card)


def _training(work: Path, source: str) -> str:
    """One line per stage, and what the person who ran them wrote into work/`source`.notes.md."""
    stages = {"settle": ["target", "settle"], "distill": ["draft", "distill"]}[source]
    lines = []
    for stage in stages:
        facts = json.loads((work / f"{stage}.json").read_text())
        kind = {
            "target": "next-token prediction",
            "settle": "next-token prediction under Gaussian noise on the blocks' matrices"
            f" ({facts['plan'].get('noise')} of each row's RMS), meant to make it less sensitive to 4-bit rounding",
            "draft": "next-token prediction, before distillation",
            "distill": "distillation from the target: forward KL on its logits, on the corpus and on its own samples",
        }[stage]
        lines.append(
            f"* {kind}: {facts['tokens']:,} tokens in {facts['steps']:,} steps, {facts['minutes']} minutes on 1 or 2"
            " cores (bfloat16 autocast; Muon for matrices, AdamW for the embedding; warm-up, flat, linear to zero)"
        )
    notes = work / f"{source}.notes.md"
    return "\n".join(lines) + (f"\n\n{notes.read_text().strip()}" if notes.is_file() else "")
