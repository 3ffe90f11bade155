"""What a report says of the stages that train."""

import math
from collections.abc import Mapping
from typing import Any

from compress.export import told


def training_findings(training: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence or two for each of the stages heal, draft, medusa and block_draft of `calibration.training`; the
    others say theirs elsewhere."""
    heal, draft, medusa, block = (training.get(kind, {}) for kind in ("heal", "draft", "medusa", "block_draft"))
    return told(
        "perplexity" in heal and _healed(**heal["perplexity"]),
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
