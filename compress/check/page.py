"""The result of a check as one self-contained HTML file, in the style of the report's pages."""

from collections.abc import Iterator

from compress.check import show
from compress.check.findings import Result, Weight
from compress.report.page import render

_MOST = 60


def html(result: Result) -> str:
    """The page; everything in it is escaped."""
    return render("check.html.j2", view(result), autoescape=True)


def view(result: Result) -> dict[str, object]:
    """What the template shows."""
    depth = result.depth
    return {
        "result": result,
        "cards": list(_cards(result)),
        "covered": list(show.covered(result.coverage)),
        "errors": show.errors(result),
        "depth": show.depth(result),
        "blocks": [] if depth is None else list(zip(range(len(depth.own)), depth.inherited, depth.own, strict=True)),
        "worst": _worst(result.weights),
        "loads": {True: "loads", False: "no", None: "perhaps"},
        "widest": max([*(depth.inherited if depth else []), 1e-9]),
    }


def _cards(result: Result) -> Iterator[dict[str, str]]:
    alarms = [finding for finding in result.findings if finding.level != "note"]
    tone = "good" if result.level == "good" else "bad"
    yield {"tone": tone, "value": result.level, "label": "verdict", "caption": f"{len(alarms)} findings"}
    total = sum(row.weights for row in result.coverage)
    bits = sum(row.weights * row.bits for row in result.coverage) / total if total else 0.0
    caption = f"{total / 1e6:,.1f} M weights, stored as {result.form}"
    yield {"tone": "", "value": f"{bits:.2f}", "label": "bits a weight", "caption": caption}
    if result.depth is not None and result.depth.kl_divergence is not None:
        agreement = f"top-1 agreement {result.depth.top1_agreement:.1%}, {result.depth.tokens} tokens"
        yield {"tone": "", "value": f"{result.depth.kl_divergence:.3g}", "label": "KL, nats", "caption": agreement}
    else:
        engines = sum(engine.loads is True for engine in result.engines)
        caption = ", ".join(engine.name for engine in result.engines if engine.loads)
        yield {"tone": "", "value": str(engines), "label": "engines load it", "caption": caption or "none"}


def _worst(weights: list[Weight]) -> list[Weight]:
    """Those farthest from the original, over what rounding to nearest gives; plain ones last."""
    compared = [weight for weight in weights if weight.error is not None]
    return sorted(compared, key=lambda w: (w.factor is None, -(w.factor or w.error or 0.0)))[:_MOST]
