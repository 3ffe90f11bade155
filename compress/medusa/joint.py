"""Medusa-2 (Cai et al. 2024, 2401.10774, section 2.2.2): heads and model trained together, then compressed again."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from compress.logits import log_probabilities, token_nll
from compress.medusa import frozen, own_text
from compress.recipe.training import Budget
from compress.recipe.training_stages import Joint, Medusa
from compress.training import float_model
from compress.training.contract import Group, Loss, StageContext
from runtime import load
from runtime.contract import Decoder, Rows, integers

_ROWS = 512


def run_joint(stage: Medusa, context: StageContext, out: Path) -> dict[str, Any]:
    """Trains heads alone, then heads and model; writes the heads to `out`, and the model, packed again, to its model/.

    The model learns to stay what it was (KL to the original, on the text that the heads learn from) while its hidden
    states get easier to continue from. The report's part says what held-out perplexity became of it.

    Raises UserError as medusa.run; ValueError where nothing can pack.
    """
    if context.pack is None:
        raise ValueError("medusa-2 comes after packing, and needs to pack again")
    joint = stage.joint or Joint()
    target = load(context.model, threads=torch.get_num_threads())
    text = own_text.make_text(stage, context, target, stage.heads + 2)
    heads = frozen.new_heads(stage, context.model)
    before = frozen.assess(stage, heads, target, text, context.work / "before")
    alone = frozen.HeadsTask(heads, stage, text, context.settings.autocast)
    budget = own_text.budget_left(stage, context, text)
    frozen.train_on(alone, text, context, share(budget, joint.warmup), context.work / "heads")
    student = float_model.Student.load(context.original, "cpu")
    both = JointTask(alone, student.model, float_model.load(context.original), joint)
    trained = frozen.train_on(both, text, context, share(budget, 1 - joint.warmup), context.work / "joint")
    plain = context.work / "plain"
    for stale in (plain, out / "model"):
        shutil.rmtree(stale, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    student.write(plain, context.run.shard_bytes)
    context.pack(plain, out / "model")
    packed = load(out / "model", threads=torch.get_num_threads())
    perplexity = {
        "before": perplexity_of(target.decoder, context.held_out),
        "after": perplexity_of(packed.decoder, context.held_out),
    }
    lost = perplexity["after"] / perplexity["before"] - 1
    context.run.note(
        f"medusa-2: held-out perplexity {perplexity['before']:.3f} before, {perplexity['after']:.3f} after"
    )
    # The new model's own words and hidden states choose the tree.
    how = own_text.Wanted(stage.continuations, text.prompts)
    watched = own_text.continued(how, context, packed, text.aside, context.work / "after")
    after = frozen.assess(stage, heads, packed, replace(text, watched=watched), out)
    return frozen.summary(stage, text, before, after, trained) | {"perplexity": perplexity, "perplexity_lost": lost}


def share(budget: Budget, part: float) -> Budget:
    """A part of a budget; the most tokens stay, as they are of each part."""
    if budget.minutes is not None:
        return replace(budget, minutes=budget.minutes * part)
    assert budget.tokens is not None
    return Budget(tokens=max(1, int(budget.tokens * part)))


class JointTask(frozen.HeadsTask):
    """Heads and the blocks of their model. Embedding and output head stay: the heads share them."""

    def __init__(self, alone: frozen.HeadsTask, model: Any, teacher: Any, joint: Joint) -> None:
        super().__init__(alone.heads, alone.stage, alone.text, alone.autocast)
        self._model, self._teacher, self._joint = model.eval(), teacher.eval().requires_grad_(False), joint
        outside = (model.get_input_embeddings(), model.get_output_embeddings())
        kept = {id(parameter) for module in outside for parameter in module.parameters()}
        self._trained = {name: p for name, p in model.named_parameters() if id(p) not in kept}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) not in kept)

    def groups(self) -> list[Group]:
        """The heads and the model, each at its share of the rate, the model without decay."""
        parameters = list(self._trained.values())
        own = Group("model", parameters, rate_factor=self._joint.rate_factor, weight_decay=0.0)
        return [*(replace(group, rate_factor=self._joint.heads_factor) for group in super().groups()), own]

    def loss(self, batch: Tensor, progress: float) -> Loss:
        """batch (B, 1): numbers of windows."""
        tokens, _ = self.text.train.read(batch.flatten().tolist())
        return self._both(tokens)

    def evaluate(self) -> float:
        """Mean loss over held-out windows, nats."""
        values, counts = [], []
        watched = self.text.watched.tokens()[: own_text.WATCHED]
        for tokens in watched.split(frozen.windows_at_once(self.text, self.heads)):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                values.append(float(self._both(tokens).value))
            counts.append(len(tokens))
        return sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)

    def state(self) -> dict[str, Tensor]:
        """Heads, and what of the model is trained."""
        heads = {f"heads.{name}": tensor for name, tensor in super().state().items()}
        return heads | {f"model.{name}": parameter.detach() for name, parameter in self._trained.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        parts = {name: tensor for name, tensor in state.items() if name.startswith("heads.")}
        super().load({name.removeprefix("heads."): tensor for name, tensor in parts.items()})
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(state[f"model.{name}"])

    def _both(self, tokens: Tensor) -> Loss:
        with torch.no_grad():
            wanted = self._teacher(tokens).logits.float()
        found = self._model(tokens, output_hidden_states=True)
        kl = functional.kl_div(
            found.logits.float().log_softmax(-1).flatten(0, 1),
            wanted.log_softmax(-1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        states = found.hidden_states[-1]
        hidden, targets = frozen.pairs(tokens, states, self.text.first, len(self.heads.heads))
        heads, _ = frozen.heads_loss(self.heads(hidden), targets, self.stage.decay)
        parts = {"kl": float(kl.detach()), "heads": float(heads.detach())}
        return Loss(kl + self._joint.weight * heads, parts)


@torch.inference_mode()
def perplexity_of(decoder: Decoder, windows: Tensor) -> float:
    """exp of the mean loss over (n, length) windows, through the kernels."""
    cache, losses = decoder.new_cache(), []
    for window in windows:
        handle = cache.open(len(window))
        for first in range(0, len(window) - 1, _ROWS):
            piece = window[first : min(first + _ROWS, len(window) - 1)]
            rows = Rows.chains([(handle, first, len(piece))])
            logits = decoder.forward(integers(piece.tolist()), rows, cache).logits
            losses.append(token_nll(log_probabilities(logits), window[first + 1 : first + 1 + len(piece)]))
        cache.close(handle)
    return math.exp(float(torch.cat(losses).mean()))
