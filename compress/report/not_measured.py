"""Why figures of a report are null: the reasons, the paths that they stand for, and the check that none is missing."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

# Dotted path of a figure ("speed.baselines.2.tokens_per_second"; it covers what is below it) → why there is none.
Reasons = dict[str, str]

NO_QUALITY = "no evaluation tokens were asked for (--eval-tokens 0)"
NO_SPEED = "left out (--no-speed)"
NOT_LOADED = "neither quality nor speed was asked for, so the models were not loaded"
TOO_FEW = "too few tokens were decoded or drafted to tell"

# Nulls that are statements rather than missing figures: no draft, no interpreter, nothing pruned, nothing drafted, no
# failure, a verdict that needs no more text.
_STATEMENTS = (
    "draft",
    "asked.*",
    "size.sparsity",
    "quality.corpus.python",
    "quality.verdict.needs_tokens",
    "quality.verdict.needs_choices",
    "exports.*.worst",
    "quality.layers.*.output_error",
    "quality.tasks.*.*",
    "quality.long_context",
    "quality.long_context.rows.*.why",
    "quality.layers.*.damping",
    "speed.pairings.*.*",
    "speed.baselines.*.why",
    "speed.baselines.*.prompts",
    "speed.baselines.*.new_tokens",
    "speed.baselines.*.warm_up_seconds",
    "certificate.logits",
    "certificate.logits_why",
)


def unexplained(report: dict[str, Any]) -> list[str]:
    """Paths of nulls that neither are statements nor stand under a path of `not_measured`."""
    reasons = tuple(report.get("not_measured", {}))
    return [
        path
        for path in null_paths(report)
        if not any(covers(reason, path) for reason in reasons)
        # A statement is about itself, not about what would stand below it.
        and not any(covers(said, path) and said.count(".") == path.count(".") for said in _STATEMENTS)
    ]


def reason_for(reasons: Mapping[str, str], path: str) -> str | None:
    """Why the figure at a dotted path was not measured: the most specific reason."""
    found = [reason for reason in reasons if covers(reason, path)]
    return reasons[max(found, key=lambda r: r.count("."))] if found else None


def covers(reason: str, path: str) -> bool:
    """Whether a path of `not_measured` stands for `path`: itself or something above it. `*` stands for one key."""
    wanted, parts = reason.split("."), path.split(".")
    return len(wanted) <= len(parts) and all(fnmatchcase(p, w) for w, p in zip(wanted, parts, strict=False))


def null_paths(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of all nulls, depth first. The reasons themselves are not looked at."""
    if value is None:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        if not path and key == "not_measured":
            continue
        yield from null_paths(item, f"{path}.{key}" if path else str(key))
