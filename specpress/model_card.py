"""The model card of a run: the hub's metadata, the figures, how to load the model, and the report."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from compress.export import told
from compress.report.schema import Report
from compress.report.wording import megabytes, number
from runtime.files import regular

# What config.json's quant_method asks for, as pip knows it.
_LOADERS = {
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel optimum",
    "awq": "gptqmodel",
    "bitnet": None,
    "specpress-trellis": "specpress",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def model_card(
    report: Report, config: Mapping[str, Any], repo: str, text: str, base: str | None, license_: str | None
) -> str:
    """README.md of the repository `repo`: metadata in YAML, then Markdown.

    config    the compressed model's config.json.
    text      report.md, which ends the card.
    base      the base model's name on the hub; None: the report's, where it has the form of one.
    license_  the base model's license, where it states one.
    """
    base = base or (report.model if _HUB_NAME.fullmatch(report.model) else None)
    method = (config.get("quantization_config") or {}).get("quant_method")
    about = report.asked.recipe.get("about", "")
    source = f"[{base}](https://huggingface.co/{base})" if base else f"`{report.model}`"
    parts = [
        f"---\n{yaml.safe_dump(_metadata(report, base, license_, method), sort_keys=False)}---",
        f"# {repo.partition('/')[2]}",
        f"{source}, compressed with Specpress by the recipe `{report.recipe}`{': ' + about if about else '.'}",
        _figures(report),
        _loading(repo, method, report.draft is not None),
        "## Report",
        re.sub(r"^#", "###", text, flags=re.MULTILINE).strip(),
    ]
    return "\n\n".join(parts) + "\n"


def read_license(model: Path) -> str | None:
    """The license that a model directory's own card states, if it has a card. Licence texts are not guessed at."""
    try:
        text = regular(model / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    head = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    try:
        data = yaml.safe_load(head.group(1)) if head else None
    except yaml.YAMLError:
        return None
    stated = data.get("license") if isinstance(data, dict) else None
    return stated if isinstance(stated, str) else None


def _metadata(report: Report, base: str | None, license_: str | None, method: str | None) -> dict[str, Any]:
    tags = ["specpress", report.recipe, *([method] if method else [])]
    found: dict[str, Any] = {}
    if base is not None:
        found |= {"base_model": base, "base_model_relation": "quantized" if method else "finetune"}
    if license_ is not None:
        found["license"] = license_
    found |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    return found | {"tags": [*tags, *(["speculative-decoding"] if report.draft else [])]}


def _figures(report: Report) -> str:
    """The table size × quality × speed; what was not measured says so."""
    size, quality, speed = report.size, report.quality, report.speed
    paces = [number(way.tokens_per_second if way else None, 1) for way in (speed.original, speed.compressed)]
    speculative = number(speed.speculative.tokens_per_second if speed.speculative else None, 1)
    draft = f"+ {megabytes(size.draft_bytes)} draft" if size.draft_bytes else ""
    perplexities = [number(value, 3) for value in (quality.perplexity.original, quality.perplexity.compressed)]
    rows = [
        ("size on disk", megabytes(size.original_bytes), megabytes(size.compressed_bytes), draft),
        ("perplexity", *perplexities, ""),
        ("tokens/s", *paces, speculative),
    ]
    facts = told(
        f"{size.ratio:.2f} × smaller",
        size.bits_per_weight is not None and f"{size.bits_per_weight:.2f} bits per quantised weight",
        quality.kl_divergence is not None and f"KL divergence {quality.kl_divergence.mean:.4f} nats a token",
        speed.drafter is not None
        and (f"drafter {speed.drafter}" if speed.pays else "no drafter was faster than plain decoding"),
        speed.pays and speed.acceptance_rate is not None and f"acceptance rate α = {speed.acceptance_rate:.2f}",
        speed.pays and f"draft length γ = {number(speed.mean_draft_length, 1)}",
    )
    lines = ["| | original | compressed | compressed, speculative |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    machine = report.machine
    return "\n".join(lines) + f"\n\n{', '.join(facts)}. Measured on {machine.cpu}, {machine.cores} cores."


def _loading(repo: str, method: str | None, has_draft: bool) -> str:
    """How to load it with transformers and with Specpress."""
    needs, name = _LOADERS.get(method or ""), repo.partition("/")[2]
    registers = "import runtime.formats.transformers  # of specpress\n" if needs == "specpress" else ""
    return f"""## How to load it

With transformers (`pip install transformers{f" {needs}" if needs else ""}`):

```python
{registers}from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}")
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```

With Specpress, which runs the packed weights as they are and decodes speculatively:

```bash
hf download {repo} --local-dir {name}
specpress generate --target {name}{f" --draft {name}/draft" if has_draft else ""} --prompt "Tell me about gravity."
```"""
