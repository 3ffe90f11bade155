"""Medusa heads (Cai et al. 2024, 2401.10774) for a packed model that stays as it is.

The model is frozen, so its hidden states are computed once, by the kernels that will run it, and kept on
disk; training is then as quick as the heads are small. Medusa-2 is in joint.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.medusa.heads import MedusaHeads, accuracies, grow_tree, token_ranks
from compress.medusa.own_text import WATCHED, Text, budget_left, make_text
from compress.recipe.training import Budget
from compress.recipe.training_stages import Medusa
from compress.training.contract import Group, Loss, StageContext, Task
from compress.training.data import AT_ONCE, ShuffledNumbers
from compress.training.loop import TrainingResult, train_stage
from runtime import Model, Speculator, formats, load
from runtime.checkpoints.architecture import describe
from runtime.checkpoints.drafter_files import weights_digest
from runtime.checkpoints.medusa import Choice
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.record import Names
from runtime.engine.metrics import Metrics
from runtime.engine.metrics import total as summed
from runtime.speculative.drafters.medusa import MedusaDrafter, load_heads


def run_frozen(stage: Medusa, context: StageContext, out: Path) -> dict[str, Any]:
    """Medusa-1: trains heads for the packed model in `context.model` and writes them to `out`; the report's part.

    Raises UserError for a text that is too short, and as the training loop does.
    """
    target = load(context.model, threads=torch.get_num_threads())
    text = make_text(stage, context, target, stage.heads + 2)
    heads = new_heads(stage, context.model)
    before = assess(stage, heads, target, text, context.work / "before")
    task = HeadsTask(heads, stage, text, context.settings.autocast)
    trained = train_on(task, text, context, budget_left(stage, context, text), context.work / "heads")
    after = assess(stage, heads, target, text, out)
    return summary(stage, text, before, after, trained)


def new_heads(stage: Medusa, model: Path) -> MedusaHeads:
    """Heads that repeat the model's own head. Raises UserError where its weights have no such table."""
    checkpoint = open_checkpoint(model)
    architecture = describe(checkpoint.config)
    names = Names() if architecture is None else architecture.names
    if checkpoint.tied:
        table = checkpoint.tensor(f"{names.embedding}.weight")
    else:
        found = checkpoint.weight(names.head)
        table = found if isinstance(found, Tensor) else formats.dequantize(found)
    return MedusaHeads(stage.heads, stage.layers, table, stage.projection == "shared")


def train_on(task: Task, text: Text, context: StageContext, budget: Budget, folder: Path) -> TrainingResult:
    """Trains on the text's windows until the budget ends; the task then holds the best weights."""
    batches = ShuffledNumbers(len(text.train), context.settings)
    return train_stage(context, task, batches, "medusa", budget=budget, folder=folder)


class HeadsTask:
    """Medusa-1: heads over hidden states that were kept. `autocast`: evaluation computes in bfloat16, too."""

    def __init__(self, heads: MedusaHeads, stage: Medusa, text: Text, autocast: bool = False) -> None:
        self.heads, self.stage, self.text, self.autocast = heads, stage, text, autocast

    def groups(self) -> list[Group]:
        return self.heads.groups(self.stage.optimizer)

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """batch (B, 1): numbers of windows."""
        value, each = self._loss(*self.text.train.read(batch.flatten().tolist()))
        return Loss(value, {f"head {k + 1}": float(one) for k, one in enumerate(each)})

    def evaluate(self) -> float:
        """Mean loss over held-out windows, nats."""
        total, count = 0.0, 0
        for tokens, states in self.text.watched.blocks(windows_at_once(self.text, self.heads)):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                total += float(self._loss(tokens, states)[0]) * len(tokens)
            count += len(tokens)
            if count >= WATCHED:
                break
        return total / count

    def state(self) -> dict[str, Tensor]:
        return dict(self.heads.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.heads.load_state_dict(dict(state))

    def _loss(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, targets = pairs(tokens, states, self.text.first, len(self.heads.heads))
        return heads_loss(self.heads(hidden), targets, self.stage.decay)


def windows_at_once(text: Text, heads: MedusaHeads) -> int:
    """Windows for which all heads' logits take as much as one model's do in another evaluation."""
    return max(1, AT_ONCE // (text.aside.shape[1] * len(heads.heads)))


def pairs(tokens: Tensor, states: Tensor, first: int, heads: int) -> tuple[Tensor, Tensor]:
    """Hidden states (n, hidden) and what each head is to say there, (n, heads).

    tokens (B, length); states (B, length, hidden). State i gives token i + 1 by the target's own head, so head k = 0,
    1, … is to say token i + 2 + k; positions from `first` on of which all heads' tokens are in the window.
    """
    last = tokens.shape[1] - 1 - heads
    following = [tokens[:, first + 2 + k : last + 2 + k] for k in range(heads)]
    return states[:, first:last].flatten(0, 1), torch.stack([one.flatten() for one in following], dim=1)


def heads_loss(logits: Sequence[Tensor], targets: Tensor, decay: float) -> tuple[Tensor, list[Tensor]]:
    """Cross entropy of the heads, weighted by decay to the power k and divided by the weights' sum; and each head's.

    logits: for each head (n, V); targets (n, heads) int64. Nats, mean over positions.
    """
    each = [functional.cross_entropy(row.float(), targets[:, k]) for k, row in enumerate(logits)]
    weights = [decay**k for k in range(len(each))]
    total = torch.stack([weight * one for weight, one in zip(weights, each, strict=True)]).sum()
    return total / sum(weights), [one.detach() for one in each]


@dataclass(frozen=True)
class HeadsQuality:
    """What heads are worth: each head's top-k accuracies, the tree, and what happened on held-out prompts with it."""

    top_k: dict[str, list[float]]
    choices: tuple[Choice, ...]
    metrics: Metrics


@torch.no_grad()
def assess(stage: Medusa, heads: MedusaHeads, target: Model, text: Text, out: Path) -> HeadsQuality:
    """Finds the tree, writes heads and tree to `out`, and decodes the held-out prompts greedily with them."""
    found = []
    for tokens, states in text.watched.blocks(windows_at_once(text, heads)):
        hidden, targets = pairs(tokens, states, text.first, len(heads.heads))
        found.append(token_ranks(torch.stack(heads(hidden), dim=1), targets))
    ranks = torch.cat(found)
    choices = grow_tree(ranks, stage.nodes)
    heads.save(out, heads.describe(choices, weights_digest(target.path)))
    drafter = MedusaDrafter(load_heads(out, target))
    speculator = Speculator(target, drafter, stage.nodes)
    results = [result for prompts, new in text.asked() for result in speculator.generate(prompts, new, stop=())]
    return HeadsQuality(accuracies(ranks), choices, summed([result.metrics for result in results]))


def summary(
    stage: Medusa, text: Text, before: HeadsQuality, after: HeadsQuality, trained: TrainingResult
) -> dict[str, Any]:
    def both(figure: Callable[[HeadsQuality], Any]) -> dict[str, Any]:
        return {"before": figure(before), "after": figure(after)}

    return {
        **trained.to_dict(),
        "kind": stage.kind,
        "heads": stage.heads,
        "continuations": stage.continuations,
        "windows": len(text.train),
        "tree": [list(choice) for choice in after.choices],
        "top_k": both(lambda one: one.top_k),
        "tokens_per_round": both(lambda one: one.metrics.tokens_per_round),
        "accepted_by_position": both(lambda one: one.metrics.accepted_by_position),
        "acceptance_rate": both(lambda one: one.metrics.acceptance_rate),
    }
