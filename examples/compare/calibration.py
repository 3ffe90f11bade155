"""The token windows that every compressor calibrates on and every result is evaluated on."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.errors import UserError


@dataclass(frozen=True)
class Text:
    """Which windows: the arguments under which our product draws the very same ones for itself.

    source  as calib.corpora.load takes it; `samples` windows of `seq_len` tokens to calibrate on, eval_tokens to
    evaluate on in windows of the same length, which are of other documents.
    """

    source: str
    samples: int
    seq_len: int
    eval_tokens: int
    seed: int


@dataclass(frozen=True)
class Drawn:
    """calibration (S, T) and evaluation (E, T) int64, and the corpus's name."""

    corpus: str
    calibration: Tensor
    evaluation: Tensor


def draw(text: Text, model: Path) -> Drawn:
    """As compress.pipeline draws them. Raises UserError, calib's or ours, where the text has too few windows."""
    from transformers import AutoConfig, AutoTokenizer

    from calib import corpora
    from calib.windows import make_windows

    tokenizer = AutoTokenizer.from_pretrained(model)
    positions = AutoConfig.from_pretrained(model).max_position_embeddings
    if text.seq_len > positions:
        raise UserError(f"--seq-len: expected at most the model's {positions} positions, found {text.seq_len}")
    corpus = corpora.load(text.source)
    windows = make_windows(
        corpus,
        tokenizer,
        length=text.seq_len,
        calibration=text.samples,
        evaluation_tokens=text.eval_tokens,
        seed=text.seed,
        separator=tokenizer.eos_token_id,
    )
    for option, found, asked in (
        ("--samples", len(windows.calibration), text.samples),
        ("--eval-tokens", len(windows.evaluation), text.eval_tokens // text.seq_len),
    ):
        if found < asked:
            raise UserError(
                f"{option}: {corpus.name} has {found} of {asked} windows of {text.seq_len} tokens; ask for less"
            )
    return Drawn(corpus.name, windows.calibration, windows.evaluation)


def write(windows: Tensor, folder: Path) -> Path:
    """The windows as JSON, in a file that is named after their content."""
    content = json.dumps(windows.tolist())
    file = folder / f"windows-{hashlib.sha256(content.encode()).hexdigest()[:12]}.json"
    if not file.exists():
        beside = file.with_name(f".{file.name}.partial")
        beside.write_text(content)
        beside.replace(file)
    return file


def facts(text: Text, drawn: Drawn, file: Path) -> dict[str, Any]:
    """For the JSON file: what a reader needs to draw them again."""
    return {
        "corpus": drawn.corpus,
        "windows": file.stem.removeprefix("windows-"),
        "calibration": list(drawn.calibration.shape),
        "evaluation": list(drawn.evaluation.shape),
        "seed": text.seed,
    }
