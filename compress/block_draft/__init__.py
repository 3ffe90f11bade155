"""The stage `block_draft`: a network that drafts for the packed model, trained on the states that its kernels give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.block_draft.beginning import begin, last_layer
from compress.block_draft.frequent import covered, frequent_tokens
from compress.block_draft.network import BlockNetwork
from compress.block_draft.task import NODES, BlockTask, Head, assess
from compress.errors import UserError
from compress.medusa.own_text import Text, budget_left, make_text
from compress.recipe.block_draft import BlockDraft
from compress.training.contract import StageContext
from compress.training.data import ShuffledNumbers
from compress.training.loop import TrainingResult, train_stage
from runtime import Model, load
from runtime.checkpoints.block_draft import Description
from runtime.checkpoints.drafter_files import weights_digest
from runtime.engine.metrics import Metrics
from runtime.model.base import BaseDecoder
from runtime.speculative.drafters.block_network import tables

# Windows whose states say what the network begins with: some rows for each number that is fitted.
_LOOKED_AT = 128


def run(stage: BlockDraft, context: StageContext, out: Path) -> dict[str, Any]:
    """Trains a drafter for the packed model in `context.model` and writes it to `out`; what the report says of it.

    Raises UserError for a model that transformers runs, taps that it does not have, a text that is too short, and as
    the training loop does.
    """
    target = load(context.model, threads=torch.get_num_threads())
    decoder = target.decoder
    if not isinstance(decoder, BaseDecoder):
        raise UserError("block_draft needs a model that Specpress' own kernels run: leave the stage out")
    about = description(stage, target, decoder)
    text = make_text(stage, context, target, about.length + 1, about.taps)
    frequent = frequent_tokens(text.train.tokens(), about.vocab_size, covered(stage, about.vocab_size))
    about = replace(about, frequent=0 if frequent is None else len(frequent))
    with torch.random.fork_rng([]):
        torch.manual_seed(context.run.seed)
        network = BlockNetwork(about, *tables(target.path, decoder), frequent)
    begun = _begin(network, context, text)
    before = assess(stage, network, target, text, context.work / "before")
    task = BlockTask(network, stage, text, Head.of(decoder, network.head), context.settings.autocast)
    trained = train_stage(
        context,
        task,
        ShuffledNumbers(len(text.train), context.settings),
        "block_draft",
        budget=budget_left(stage, context, text),
        folder=context.work / "network",
    )
    after = assess(stage, network, target, text, out)
    return summary(stage, text, begun, (before, after), trained) | {"head_tokens": about.logits}


def description(stage: BlockDraft, target: Model, decoder: BaseDecoder) -> Description:
    """The network that the stage asks for, of the target's sizes. Raises UserError for taps that the model lacks."""
    a, layers = decoder.architecture, decoder.layers
    taps = stage.taps or tuple(sorted({layers // 2, layers - 1, layers}))
    if max(taps) > layers:
        raise UserError(f"block_draft.taps: expected at most the model's {layers} layers, found {list(taps)}: lower it")
    if stage.distill and taps[-1] != layers:
        raise UserError(
            f"block_draft.taps: expected the model's {layers} layers in the last place, from where its distribution is "
            f"known, or distill 0, found {list(taps)}"
        )
    heads = (a.heads, a.kv_heads, a.head_dim) if a.heads and a.latent is None else _heads(a.hidden)
    return Description(
        taps,
        stage.draft_length,
        stage.layers,
        *heads,
        stage.intermediate_size or a.intermediate,
        stage.window,
        stage.rank,
        a.hidden,
        a.vocab,
        stage.scheme,
        stage.head,
        weights_digest(target.path),
        a.norm_eps,
    )


def _heads(hidden: int) -> tuple[int, int, int]:
    """Heads, heads of keys and dimensions of a network whose target has none of the usual kind."""
    heads = max(1, hidden // 64)
    return heads, heads, min(64, hidden // 2 * 2)


def _begin(network: BlockNetwork, context: StageContext, text: Text) -> bool:
    """Begins as the target's last layer, where that can be."""
    layer = last_layer(context.model)
    if layer is None:
        return False
    return begin(network, layer, *text.train.read(range(min(_LOOKED_AT, len(text.train)))))


def summary(
    stage: BlockDraft, text: Text, begun: bool, metrics: tuple[Metrics, Metrics], trained: TrainingResult
) -> dict[str, Any]:
    """What the report says: how it was trained, and figures of held-out prompts before and after."""
    found = {
        name: {"before": getattr(metrics[0], name), "after": getattr(metrics[1], name)}
        for name in ("tokens_per_round", "accepted_by_position", "acceptance_rate")
    }
    return {
        **trained.to_dict(),
        "network_layers": stage.layers,
        "draft_length": stage.draft_length,
        "nodes": NODES,
        "continuations": stage.continuations,
        "windows": len(text.train),
        "begins_as_the_last_layer": begun,
        **found,
    }
