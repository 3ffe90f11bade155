"""What the report says of stages that trained: a sentence or two each."""

import math
from collections.abc import Mapping
from typing import Any

from compress.export import told


def training_findings(training: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence or two for each of the stages heal, learn, draft, medusa and block_draft of `calibration.training`;
    the others say theirs elsewhere."""
    kinds = ("heal", "learn", "draft", "medusa", "block_draft")
    heal, learn, draft, medusa, block = (training.get(kind, {}) for kind in kinds)
    return told(
        "perplexity" in heal and _healed(**heal["perplexity"]),
        "kept" in learn and _learned(learn),
        "acceptance" in draft and _aligned(**draft["acceptance"]),
        "tokens_per_round" in medusa
        and _gained(
            medusa,
            "The Medusa heads'",
            f"the tree of {len(medusa['tree'])} nodes the {medusa['heads']} Medusa heads gain",
            "they gain",
        ),
        "tokens_per_round" in block
        and _gained(
            block, "The block drafter's", f"{block['nodes']} drafted tokens the block drafter gains", "it gains"
        ),
    )


def won_back(original: float, pruned: float, healed: float) -> float | None:
    """The share of the log-perplexity lost by pruning that healing has won back; None where pruning lost nothing."""
    lost = math.log(pruned / original)
    return math.log(pruned / healed) / lost if lost > 0 else None


def _healed(original: float, pruned: float, healed: float) -> str:
    share = won_back(original, pruned, healed)
    gain = ""
    if share is not None:
        gain = (
            ": it has NOT helped" if share <= 0 else f", which wins back {100 * share:.0f} % of the log-perplexity lost"
        )
    return (
        f"Pruning took perplexity on the windows held out of training from {original:.2f} to {pruned:.2f}; healing has "
        f"brought it to {healed:.2f}{gain}."
    )


def _learned(learn: Mapping[str, Any]) -> str:
    plain, kept = learn["held_out_kl"]["plain"], learn["held_out_kl"]["kept"]
    if learn["kept"] == "plain":
        return (
            "Training of scales and codes has NOT helped: nothing came below the KL divergence of the codes as they "
            f"were chosen, {plain:.5f} nats on windows held out of training, so that those are kept."
        )
    return (
        "Training of scales and codes has taken the KL divergence on windows held out of training from "
        f"{plain:.5f} to {kept:.5f} nats ({100 * (kept / plain - 1):+.0f} %); {100 * learn['moved']:.2f} % of the "
        "codes are others than before. Layers' errors in this report are those before it."
    )


def _aligned(before: dict[str, Any], after: dict[str, Any]) -> str:
    start, end = before["acceptance_rate"], after["acceptance_rate"]
    greedy = "nothing was drafted greedily" if start is None or end is None else f"{start:.3f} to {end:.3f}"
    worse = " It has NOT helped." if after["agreement"] <= before["agreement"] else ""
    return (
        "Training the draft on the compressed model has changed its greedy acceptance on held-out text, 4 drafted "
        f"tokens a round: {greedy}; the share of positions where both put the same token first: "
        f"{before['agreement']:.3f} to {after['agreement']:.3f}.{worse}"
    )


def _gained(found: dict[str, Any], whose: str, drafting: str, they: str) -> str:
    before, after = found["tokens_per_round"]["before"], found["tokens_per_round"]["after"]
    if before is None or after is None:
        return f"{whose} tokens a round could not be measured: nothing was drafted."
    return f"With {drafting} {after:.2f} tokens a round on held-out text; untrained {they} {before:.2f}."
