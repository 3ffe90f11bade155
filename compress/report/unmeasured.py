"""The sections of a report whose figures were not asked for."""

from typing import Any

NO_QUALITY = "no evaluation tokens were asked for (--eval-tokens 0)"
NOT_LOADED = "neither quality nor speed was asked for, so the models were not loaded"


def quality(window: int, head: str) -> dict[str, Any]:
    """The `quality` section without a figure; `window` tokens would have been in one, the head is stored as `head`."""
    figures = ("perplexity", "bits_per_byte", "kl_divergence", "top1_agreement", "kv_perplexity")
    return {
        "protocol": {"window": window, "stride": window, "tokens": 0, "head": head},
        "perplexity": {"original": None, "compressed": None, "ci95": None},
        "bits_per_byte": {"original": None, "compressed": None},
        "kl_divergence": None,
        "top1_agreement": None,
        "kv_perplexity": None,
        "not_measured": dict.fromkeys(figures, NO_QUALITY),
    }
