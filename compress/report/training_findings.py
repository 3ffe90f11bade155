"""What the stages that trained have achieved, in sentences. Figures come from report.json's dict, nothing else."""

import math
from typing import Any


def training_findings(report: dict[str, Any]) -> list[str]:
    """A sentence or two for each of the stages heal, draft and medusa; the others say theirs elsewhere."""
    training, out = report["calibration"]["training"], list[str]()
    if "perplexity" in (heal := training.get("heal", {})):
        out.append(_healed(**heal["perplexity"]))
    if "acceptance" in (draft := training.get("draft", {})):
        out.append(_aligned(draft["acceptance"]["before"], draft["acceptance"]["after"]))
    if "tokens_per_round" in (medusa := training.get("medusa", {})):
        out.append(_with_heads(medusa))
    return out


def won_back(original: float, pruned: float, healed: float) -> float | None:
    """The share of the log-perplexity lost by pruning that healing has won back; None where pruning lost nothing."""
    lost = math.log(pruned / original)
    return math.log(pruned / healed) / lost if lost > 0 else None


def _healed(original: float, pruned: float, healed: float) -> str:
    share = won_back(original, pruned, healed)
    sentence = (
        f"Pruning took perplexity on the windows held out of training from {original:.2f} to {pruned:.2f}; healing has "
        f"brought it to {healed:.2f}"
    )
    if share is None:
        return f"{sentence}."
    if share <= 0:
        return f"{sentence}: it has NOT helped."
    return f"{sentence}, which wins back {100 * share:.0f} % of the log-perplexity lost."


def _aligned(before: dict[str, Any], after: dict[str, Any]) -> str:
    start, end = before["acceptance_rate"], after["acceptance_rate"]
    greedy = "nothing was drafted greedily" if start is None or end is None else f"{start:.3f} to {end:.3f}"
    worse = " It has NOT helped." if after["agreement"] <= before["agreement"] else ""
    return (
        "Training the draft on the compressed model has changed its greedy acceptance on held-out text, 4 drafted "
        f"tokens a round: {greedy}; the share of positions where both put the same token first: "
        f"{before['agreement']:.3f} to {after['agreement']:.3f}.{worse}"
    )


def _with_heads(medusa: dict[str, Any]) -> str:
    before, after = medusa["tokens_per_round"]["before"], medusa["tokens_per_round"]["after"]
    if before is None or after is None:
        return "The Medusa heads' tokens a round could not be measured: nothing was drafted."
    return (
        f"With the tree of {len(medusa['tree'])} nodes the {medusa['heads']} Medusa heads gain {after:.2f} tokens a "
        f"round on held-out text; untrained they gain {before:.2f}."
    )
