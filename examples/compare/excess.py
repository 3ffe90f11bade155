"""How much worse a saved checkpoint predicts held-out text than the original: one evaluator for everybody's files.

Weights are made dense float32 (dense.py) and run in transformers' own model of the architecture, in float32. Inputs of
layers whose checkpoint rounds them (W8A8) are rounded to the same grid before the layer: the product of dense weights
and rounded inputs is then what an integer kernel computes, but for float32's rounding of sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dense
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compress.logits import kl_rows, log_probabilities, token_nll
from compress.report.quality import bootstrap_interval

Floats = NDArray[np.float64]
# Checkpoints in memory at a time: the original runs once for all of them.
_TOGETHER = 8


@dataclass(frozen=True)
class Scores:
    """By evaluation window: mean over its predicted tokens, nats. loss: of the checkpoint; excess: over the original's
    loss; divergence: KL(original ‖ checkpoint)."""

    loss: Floats
    excess: Floats
    divergence: Floats


@dataclass(frozen=True)
class Interval:
    """A figure and its 95 % bootstrap interval over windows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Ours over theirs: of excess log-perplexity, and of divergence, which says the same with far less noise.

    beyond  our excess less `target` times theirs, nats a token: at or below 0 the target is met.
    """

    excess_ratio: Interval
    divergence_ratio: Interval
    beyond: Interval

    @property
    def verdict(self) -> str:
        """ "met"; "in the noise": above the target, but 0 lies in the interval; "missed"."""
        if self.beyond.value <= 0:
            return "met"
        return "in the noise" if self.beyond.low <= 0 else "missed"


def load(model: Path) -> nn.Module:
    """The checkpoint as a transformers model in float32, whose inputs are rounded where the checkpoint says so.

    Raises ValueError where tensors are missing or left over.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = dense.read(model)
    config = AutoConfig.for_model(**plain.config)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = network.load_state_dict(plain.weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise ValueError(f"{model}: tensors missing {sorted(set(missing) - tied)}, left over {sorted(unexpected)}")
    network.tie_weights()
    for name, rounding in plain.inputs.items():
        network.get_submodule(name).register_forward_pre_hook(_rounded(rounding))
    return network


def _rounded(rounding: dense.StaticInput) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda _, inputs: (rounding.round(inputs[0]), *inputs[1:])


@torch.inference_mode()
def score(original: nn.Module, compressed: Sequence[nn.Module], windows: Tensor) -> list[Scores]:
    """Each model beside the original on windows (E, T) int64: every token of a window but its first is predicted.

    Raises ValueError where a loss is NaN or infinite.
    """
    rows: list[list[list[float]]] = [[] for _ in compressed]
    for tokens in windows:
        expected = _log_probabilities(original, tokens)
        before = token_nll(expected, tokens[1:])
        for model, found in zip(compressed, rows, strict=True):
            log_p = _log_probabilities(model, tokens)
            loss = token_nll(log_p, tokens[1:])
            found.append([float(x.mean()) for x in (loss, loss - before, kl_rows(expected, log_p))])
    tables = [np.array(found) for found in rows]
    if not all(np.isfinite(table).all() for table in tables):
        raise ValueError("the loss is not finite: a checkpoint is broken")
    return [Scores(*table.T) for table in tables]


def _log_probabilities(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of what follows each token (T,) but the last: (T - 1, vocabulary) float64."""
    return log_probabilities(model(input_ids=tokens[None, :-1], use_cache=False).logits[0])


def mean(values: Floats, seed: int = 0) -> Interval:
    """The mean over windows."""
    low, high = bootstrap_interval(values[:, None], lambda means: means[:, 0], seed=seed)
    return Interval(float(values.mean()), low, high)


def compare(ours: Scores, theirs: Scores, target: float, seed: int = 0) -> Comparison:
    """Paired: a resample takes the same windows of both."""

    def paired(a: Floats, b: Floats, of: Callable[[Any, Any], Any]) -> Interval:
        low, high = bootstrap_interval(np.stack([a, b], 1), lambda means: of(means[:, 0], means[:, 1]), seed=seed)
        return Interval(float(of(a.mean(), b.mean())), low, high)

    return Comparison(
        excess_ratio=paired(ours.excess, theirs.excess, lambda a, b: a / b),
        divergence_ratio=paired(ours.divergence, theirs.divergence, lambda a, b: a / b),
        beyond=paired(ours.excess, theirs.excess, lambda a, b: a - target * b),
    )


def evaluate(original: Path, checkpoints: Sequence[Path], windows: Tensor, say: Callable[[str], None]) -> list[Scores]:
    """Scores of each checkpoint, in their order."""
    reference, found = load(original), list[Scores]()
    for first in range(0, len(checkpoints), _TOGETHER):
        chosen = checkpoints[first : first + _TOGETHER]
        say(f"evaluating checkpoints {first + 1} to {first + len(chosen)} of {len(checkpoints)}")
        models = [load(checkpoint) for checkpoint in chosen]
        for checkpoint, model in zip(chosen, models, strict=True):
            check_outside(checkpoint, reference, model)
        found += score(reference, models, windows)
    return found


def check_outside(checkpoint: Path, original: nn.Module, compressed: nn.Module) -> None:
    """Raises ValueError where the embedding or the head is another than the original's: then not only the blocks, which
    are compared, were compressed."""
    for part in ("get_input_embeddings", "get_output_embeddings"):
        if not torch.equal(getattr(original, part)().weight, getattr(compressed, part)().weight):
            raise ValueError(f"{checkpoint}: compressed outside the blocks too ({part.removeprefix('get_')})")
