"""Our 4-bit codes beside those of ONNX Runtime's own quantisers, all as MatMulNBits in ONNX Runtime.

    python examples/compare/onnx_quantizers.py --work runs/onnx-quantizers
    python examples/compare/onnx_quantizers.py --model org/name --recipes int4-gptq,int4-awq --block 32 --tokens 65536

Needs the extra `onnx`. Every model is the same float graph with the same layers in blocks of the same size, the output
head left as it is; one evaluator (compress.report.quality) runs all of them through runtime.load, on the same held-out
windows. ONNX Runtime's quantisers multiply by float inputs, as they do by default; ours round inputs to int8.
"""

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from torch import Tensor

from calib import corpora
from calib.windows import Windows, make_windows
from compress import export
from compress.errors import USER_ERRORS, UserError
from compress.model.source import default_pair

# ONNX Runtime's name of each quantiser, and whether it is asked for symmetric codes.
THEIRS = {
    "RTN, symmetric": ("DEFAULT", True),
    "RTN": ("DEFAULT", False),
    "RTN of neural-compressor": ("RTN", False),
    "HQQ": ("HQQ", False),
    '"GPTQ", symmetric': ("GPTQ", True),
    '"GPTQ"': ("GPTQ", False),
    "k-quant": ("k_quant", False),
}
LENGTH = 256


@dataclass(frozen=True)
class Row:
    """One model: perplexity on the held-out windows, with the interval of its ratio to the original's."""

    name: str
    perplexity: float
    ratio: tuple[float, float]
    divergence: float
    agreement: float
    megabytes: float
    seconds: float


def table(rows: Sequence[Row], original: float) -> str:
    """Markdown, best first."""
    head = (
        f"Original: perplexity {original:.4f}.\n\n"
        "| quantiser | perplexity | times the original's, 95 % | KL divergence | same first token | MB | made in |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {r.name} | {r.perplexity:.4f} | {r.ratio[0]:.4f} to {r.ratio[1]:.4f} | {r.divergence:.5f} |"
        f" {r.agreement:.2%} | {r.megabytes:.1f} | {r.seconds:.0f} s |\n"
        for r in sorted(rows, key=lambda row: row.perplexity)
    )


def ours(model: Path, recipe: str, block: int, work: Path) -> Path:
    """The model by one of our recipes, with groups of `block` inputs, exported."""
    from compress import Recipe
    from compress.pipeline import compress

    loaded = Recipe.load(recipe)
    stages = tuple(
        stage
        if stage.quantize is None
        else stage.model_copy(update={"quantize": stage.quantize.model_copy(update={"group_size": block})})
        for stage in loaded.stages
    )
    changed = loaded.model_copy(update={"stages": stages})
    # Only the weights are wanted here: no report.
    made = compress(model, changed, work / recipe, report=lambda *_: {})
    export.run("onnx", made.model, work / f"{recipe}-onnx")
    return work / f"{recipe}-onnx"


def theirs(floats: Path, name: str, block: int, calibration: Tensor, out: Path) -> Path:
    """The float export by one of ONNX Runtime's quantisers."""
    from onnxruntime.quantization import matmul_nbits_quantizer as nbits

    logging.getLogger(nbits.__name__).setLevel(logging.WARNING)  # a line a node otherwise
    algorithm, symmetric = THEIRS[name]
    configs: dict[str, Any] = {
        "DEFAULT": lambda: nbits.DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=symmetric),
        "RTN": nbits.RTNWeightOnlyQuantConfig,
        "HQQ": lambda: nbits.HQQWeightOnlyQuantConfig(block_size=block),
        "GPTQ": lambda: nbits.GPTQWeightOnlyQuantConfig(calibration_data_reader=Feeds(calibration, floats)),
        "k_quant": nbits.KQuantWeightOnlyQuantConfig,
    }
    shutil.copytree(floats, out)
    quantizer = nbits.MatMulNBitsQuantizer(
        str(floats / "model.onnx"), block_size=block, is_symmetric=symmetric, algo_config=configs[algorithm]()
    )
    quantizer.process()
    made = getattr(quantizer.model, "model", quantizer.model)
    (out / "model.onnx.data").unlink(missing_ok=True)
    if not any(node.op_type == "MatMulNBits" for node in made.graph.node):
        raise UserError(f"{name}: expected MatMulNBits nodes, found none: this version of ONNX Runtime wrote others")
    # Each of them names the domain, and some more than once.
    domains = {entry.domain: entry for entry in made.opset_import}
    del made.opset_import[:]
    made.opset_import.extend(domains.values())
    (out / "model.onnx").write_bytes(made.SerializeToString())
    return out


class Feeds:
    """Calibration windows as the float graph takes them (ONNX Runtime's reader, which is any iterable here)."""

    def __init__(self, windows: Tensor, floats: Path):
        import onnx

        graph = onnx.load_model(floats / "model.onnx", load_external_data=False).graph
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input}
        empty = {n: np.zeros((1, s[1], 0, s[3]), np.float32) for n, s in shapes.items() if n.startswith("past")}
        count = windows.shape[1]
        places = {"attention_mask": np.ones((1, count), np.int64), "position_ids": np.arange(count)[None]}
        self._feeds = [{"input_ids": window[None].numpy(), **places, **empty} for window in windows]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._feeds)


def score(floats: Path, folder: Path, name: str, windows: Windows, seconds: float) -> tuple[Row, float]:
    """A row, and the original's perplexity."""
    from compress.report.quality import measure
    from runtime import load

    found, _ = measure(load(floats).decoder, load(folder).decoder, windows, seed=0)
    size = sum(path.stat().st_size for path in folder.glob("model.onnx*")) / 1e6
    perplexity, interval, divergence = found.perplexity, found.perplexity.ci95, found.kl_divergence
    assert interval is not None and divergence is not None  # both models are whole
    assert perplexity.original is not None and perplexity.compressed is not None and found.top1_agreement is not None
    ratio = interval.ratio
    row = Row(name, perplexity.compressed, ratio, divergence.mean, found.top1_agreement, size, seconds)
    return row, perplexity.original


def compare(model: Path, recipes: Sequence[str], block: int, tokens: int, work: Path) -> str:
    """The table. `work` is made anew."""
    from transformers import AutoTokenizer

    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    cut = {"length": LENGTH, "calibration": 16, "evaluation_tokens": tokens, "seed": 0}
    windows = make_windows(corpora.load(), tokenizer, **cut, separator=tokenizer.eos_token_id)
    floats = work / "float"
    export.run("onnx", model, floats)
    rows, original = [], 0.0
    for name in (*recipes, *THEIRS):
        began = time.monotonic()
        if name in THEIRS:
            folder = theirs(floats, name, block, windows.calibration, work / "".join(filter(str.isalnum, name)))
        else:
            folder = ours(model, name, block, work)
        seconds = time.monotonic() - began
        label = name if name in THEIRS else f"**ours, {name}**"
        row, original = score(floats, folder, label, windows, seconds)
        print(f"{label}: {row.perplexity:.4f}", file=sys.stderr, flush=True)
        rows.append(row)
    return table(rows, original)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="a directory (default: the embedded pair's target)")
    parser.add_argument("--recipes", default="int4-gptq,int4-rtn", help="ours, separated by commas")
    parser.add_argument("--block", type=int, default=128, help="inputs that share a scale")
    parser.add_argument("--tokens", type=int, default=65_536, help="held-out tokens to measure on")
    parser.add_argument("--work", type=Path, required=True, help="folder for models; replaced")
    given = parser.parse_args()
    try:
        model = given.model or default_pair()[0]
        print(compare(model, given.recipes.split(","), given.block, given.tokens, given.work))
    except USER_ERRORS as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
