"""The verdict in words: for the first screen, for a terminal, for a column of a table."""

from compress.quality.figures import Flips, Verdict
from compress.report.schema import Report


def short(found: Verdict | None) -> str:
    """A few words: worse, +1.03 %; same within ±1 %; cannot tell: needs 200,000 tokens."""
    if found is None:
        return "not measured"
    if found.call == "same":
        return f"same within ±{_percent(found.margin)}"
    if found.call == "cannot tell":
        return f"cannot tell: needs {_needs(found)}"
    if "losses" in found.by:
        return (
            f"{found.call}, {100 * found.change:+.2f} %{f' (within ±{_percent(found.margin)})' * found.within_margin}"
        )
    return f"{found.call} at choices"


def caption(found: Verdict) -> str:
    """`short`, for a place where the call and the change of perplexity stand already."""
    said = "losses" in found.by and found.call in ("better", "worse") and not found.within_margin
    return "" if said else f"{short(found)}; "


def interval(found: Verdict) -> str:
    """The 95 % interval of the change of perplexity: -0.10 to +2.30 %."""
    low, high = (100 * bound for bound in found.ci95)
    return f"{low:+.2f} to {high:+.2f} %"


def choices(found: Flips) -> str:
    """Right choices of both, and the flips: 71.2 → 70.4 % right, 41 lost and 25 won of 2,000."""
    right = f"{100 * found.original:.1f} → {100 * found.compressed:.1f} % right"
    return f"{right}, {found.lost:,} lost and {found.won:,} won of {found.choices:,}"


def sentence(report: Report) -> str | None:
    """The verdict with what it rests on, for the page; None where there is none."""
    found, flips = report.quality.verdict, report.quality.flips
    if found is None:
        return None
    power, units = _percent(found.power), f"{found.blocks:,} {found.unit}s"
    said = (
        f"Verdict: {short(found)}. The 95 % interval of the change of perplexity is {interval(found)}, from paired"
        f" losses of {units}; a growth of {100 * found.smallest_change:.2f} % would have been shown with power"
        f" {power}."
    )
    if flips is not None:
        said += (
            f" Choices of the next line: {choices(flips)} (McNemar's exact test: p = {flips.p_value:.2g}); a loss of"
            f" {100 * flips.smallest_loss:.1f} points would have been shown."
        )
    return said


def _needs(found: Verdict) -> str:
    wants = ((found.needs_tokens, "tokens"), (found.needs_choices, "choices"))
    return " and ".join(f"{count:,} {what}" for count, what in wants if count is not None)


def _percent(share: float) -> str:
    return f"{100 * share:g} %"
