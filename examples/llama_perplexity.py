"""Whether the report's statistics of tokens are those of llama.cpp's `llama-perplexity --kl-divergence`.

    .venv/bin/python examples/llama_perplexity.py --binary PATH/llama-perplexity

Writes the built-in pair's target (or --model) as a float32 GGUF file, and once more with its blocks rounded to int4;
lets the binary compare the two, and compares them through our runtime on the tokens that the binary has read. Prints
both tables side by side. The binary is built from llama.cpp: `cmake --build build --target llama-perplexity`.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from calib import corpora
from compress.errors import USER_ERRORS, UserError
from compress.export import silent
from compress.export.gguf.file import write
from compress.model.source import default_pair
from compress.quality.statistics import divergence, token_statistics
from compress.quantize import rtn
from compress.report.quality import score_window
from runtime import load
from runtime.checkpoints.open import open_checkpoint
from runtime.cli import without_traceback
from runtime.formats import dequantize

# What the binary calls a figure → its name here; a percentage there is a share here.
_FIGURES = {
    "Mean PPL(base)": "original perplexity",
    "Mean PPL(Q)": "compressed perplexity",
    "Mean PPL(Q)/PPL(base)": "perplexity ratio",
    "Mean    KLD": "KL mean",
    "Maximum KLD": "KL max",
    "99.9%   KLD": "KL 99.9 %",
    "99.0%   KLD": "KL 99 %",
    "Median  KLD": "KL median",
    "RMS Δp": "Δp RMS",
    "Same top p": "same top",
}
_LINE = re.compile(r"^\s*(.+?)\s*:\s*(-?[\d.]+)(?:%|\s*±\s*([\d.]+))?", re.MULTILINE)
_GROUP = 32
# llama.cpp prints by a thread that it does not wait for at its end, so that the last lines are sometimes lost.
_TRIES = 20


def rounded(model: Path, out: Path) -> Path:
    """The model with the matrices of its blocks rounded to int4 and back, float32."""
    checkpoint = open_checkpoint(model)
    tensors: dict[str, Tensor] = {}
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name).float()
        in_block = ".layers." in name and tensor.dim() == 2
        tensors[name] = dequantize(rtn.quantize(tensor, "int4", _GROUP)) if in_block else tensor
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in model.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    return out


def exported(model: Path, out: Path) -> Path:
    """The model as a float32 GGUF file."""
    out.mkdir()
    write(model, out, silent, floats="f32")
    return next(out.glob("*.gguf"))


def theirs(binary: Path, base: Path, other: Path, text: str, window: int, work: Path) -> dict[str, tuple[float, float]]:
    """What the binary prints of two models: (value, error) by our names. `work` then holds base.kld."""
    (work / "text.txt").write_text(text, encoding="utf-8")
    # Two float32 models through a float32 cache: the arithmetic is as good as ours, whatever the machine's paths.
    plain = ["-c", window, "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "1", "--no-repack"]
    kept = ["--kl-divergence-base", work / "base.kld"]
    _run([binary, "-m", base, "-f", work / "text.txt", *plain, *kept])
    for _ in range(_TRIES):
        found = figures(_run([binary, "-m", other, *plain, *kept, "--kl-divergence"]))
        if found.keys() == set(_FIGURES.values()):
            return found
    raise UserError(
        f"{binary} lost the end of what it prints in {_TRIES} runs; it printed {', '.join(found) or 'nothing'}"
    )


def figures(printed: str) -> dict[str, tuple[float, float]]:
    """The statistics in what the binary prints: (value, error) by our names; an error that is not printed is 0."""
    found: dict[str, tuple[float, float]] = {}
    for name, value, error in _LINE.findall(printed):
        if name in _FIGURES:
            by = 100 if "Δp" in name or name.startswith("Same") else 1
            found[_FIGURES[name]] = float(value) / by, float(error or 0) / by
    return found


def _run(command: list[object]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise UserError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout + done.stderr


def read_tokens(file: Path) -> Tensor:
    """The windows (chunks, window) int64 of a file of log-probabilities that llama-perplexity wrote."""
    with file.open("rb") as opened:
        if opened.read(8) != b"_logits_":
            raise UserError(f"{file}: expected a file of llama-perplexity --kl-divergence-base, found another")
        window, _, chunks = np.frombuffer(opened.read(12), np.int32)
        tokens = np.frombuffer(opened.read(4 * window * chunks), np.int32)
    return torch.from_numpy(tokens.reshape(chunks, window).astype(np.int64))


def ours(base: Path, other: Path, windows: Tensor) -> dict[str, tuple[float, float]]:
    """The same figures through our runtime. As there, only tokens of each window's second half are predicted."""
    original, compressed = (load(path).decoder for path in (base, other))
    half = windows.shape[1] // 2
    scores = [score_window(original, compressed, window) for window in windows]
    before, after, kl, agrees = (
        np.concatenate([getattr(one, name)[half:].numpy() for one in scores])
        for name in ("original_nll", "compressed_nll", "kl", "agrees")
    )
    spread, found = divergence(kl), token_statistics(before, after, agrees)
    ratio, rms, top = found.perplexity_ratio, found.delta_p_rms, found.same_top
    assert spread.mean_error is not None and spread.max is not None
    assert spread.median is not None and spread.p999 is not None
    return {
        "original perplexity": (float(np.exp(before.mean())), 0.0),
        "compressed perplexity": (float(np.exp(after.mean())), 0.0),
        "perplexity ratio": (ratio.value, ratio.error),
        "KL mean": (spread.mean, spread.mean_error),
        "KL median": (spread.median, 0.0),
        "KL 99 %": (spread.p99, 0.0),
        "KL 99.9 %": (spread.p999, 0.0),
        "KL max": (spread.max, 0.0),
        "Δp RMS": (rms.value, rms.error),
        "same top": (top.value, top.error),
    }


def compare(
    binary: Path, model: Path, tokens: int, window: int
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    """llama-perplexity's figures, and ours, on about so many tokens of this Python's held-out files."""
    text = "\n".join(corpora.load("stdlib").documents)[: 4 * tokens]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        base, other = exported(model, work / "base"), exported(rounded(model, work / "rounded"), work / "other")
        printed = theirs(binary, base, other, text, window, work)
        return printed, ours(base, other, read_tokens(work / "base.kld"))


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def show(printed: dict[str, tuple[float, float]], found: dict[str, tuple[float, float]]) -> None:
    """A table of llama-perplexity's figures and ours."""
    table = Table("figure", "llama.cpp", "error", "here", "error", "differ by")
    for name, (value, error) in found.items():
        theirs_value, theirs_error = printed[name]
        differ = abs(value / theirs_value - 1) if theirs_value else abs(value)
        shown = (f"{one:.6f}" for one in (theirs_value, theirs_error, value, error))
        table.add_row(name, *shown, f"{differ:.1e}")
    Console().print(table)


@app.command()
def main(
    binary: Annotated[Path, typer.Option(help="llama-perplexity; `make llama-server` builds .peers/llama-perplexity.")],
    model: Annotated[
        Path | None, typer.Option(help="A directory with plain weights.", show_default="the pair's target")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the text, about.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
) -> None:
    """Prints llama-perplexity's figures beside ours."""
    with without_traceback(USER_ERRORS):
        if not binary.is_file():
            raise UserError(f"--binary: {binary} is no file; `make llama-server` builds .peers/llama-perplexity")
        show(*compare(binary, model or default_pair()[0], tokens, window))


if __name__ == "__main__":
    app()
