"""plan.md and plan.html from plan.json's data: the same figures and the same sentences in both.

The page loads nothing, runs nothing, and everything in it is escaped.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from compress.best import bit_map, plots
from compress.best.budgets import Budgets
from compress.report.page import cell, fenced, render
from compress.report.schema_speed import PLAIN
from compress.report.wording import Headline, megabytes, number, times

Data = Mapping[str, Any]
_NONE = "–"
_DAMAGES = {
    "measured": "measured, each layer rounded alone in every way",
    "estimated": "estimated from gradients: to measure them would have taken too much of --minutes",
}
_FRONT_NOTE = (
    "The line is predicted, and corrected by the candidates that were measured: it ranks, and is a forecast only near "
    "them. Squares are candidates as they were measured, crosses those that broke a budget; a thin line leads to what "
    "was predicted. Further down is better, for sizes further left, for speed further right."
)


def html(data: Data) -> str:
    """One self-contained page."""
    return render("plan.html.j2", {**_view(data), "plots": plots.all_plots(data)}, autoescape=True)


def markdown(data: Data) -> str:
    """The same for GitHub and terminals, without plots."""
    text = render("plan.md.j2", _view(data), autoescape=False, cell=cell, fenced=fenced)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _view(data: Data) -> dict[str, Any]:
    budgets = Budgets.from_dict(data["budgets"])
    best = next(one for one in data["candidates"] if one["key"] == data["winner"])
    return {
        "title": f"The best of {data['model']} for {budgets.goal}",
        "asked": asked(budgets),
        "schema": data["schema"],
        "cards": _cards(data, best),
        "budgets": _budgets(budgets, data, best),
        "candidates": [_candidate(budgets, data, number, one) for number, one in enumerate(data["candidates"], 1)],
        "figure_heading": "KL, nats" if budgets.kl is not None else "perplexity, %",
        "counted": "the mean" if budgets.kl is not None else "the upper end of the 95 % interval of its growth",
        "with_ttft": budgets.ttft is not None,
        "first_of_original": _ms(data["original"]["ttft_ms"]),
        "map": bit_map.draw(data["units"]),
        "units": data["units"],
        "front_note": _FRONT_NOTE,
        "front": [_point(budgets, one) for one in data["front"]],
        "sizes": _other_sizes(budgets, data["prices"]["steps"]),
        "worse": _worse(budgets, data["prices"]["worse"]),
        "upgrades": [_upgrade(budgets, one) for one in data["prices"]["upgrades"]],
        "not_tried": data["not_tried"],
        "further": [_further(one) for one in data["further"]],
        "about": list(_about(data["about"], data["cache"])),
    }


def asked(budgets: Budgets) -> str:
    """The budgets in one line."""
    words = []
    if budgets.figure_limit is not None:
        words.append(f"{budgets.shown(budgets.figure_limit)} at most")
    if budgets.disk is not None:
        words.append(f"{megabytes(budgets.disk)} on disk")
    if budgets.memory is not None:
        words.append(f"{megabytes(budgets.memory)} in memory")
    if budgets.latency is not None:
        words.append(f"{budgets.latency:g} ms a token")
    if budgets.ttft is not None:
        words.append(f"{budgets.ttft:g} ms to the first token")
    return ", ".join(words)


def _cards(data: Data, best: Data) -> list[Headline]:
    found, original, way = best["measured"], data["original"], best["fastest"]
    growth, upper = found["perplexity_growth"], found["perplexity_growth_upper"]
    gain = way["tokens_per_second"] / max(original["fastest"]["tokens_per_second"], 1e-9)
    ratio = original["disk"] / found["disk"]
    end = "" if upper is None else f"At most {100 * upper:+.2f} % with 95 % confidence; "
    size = (
        f"{megabytes(original['disk'])} → {megabytes(found['disk'])} on disk; {megabytes(found['memory'])} in memory "
        "with keys, values and draft"
    )
    speed = (
        f"{way['tokens_per_second']:,.0f} tokens/s with {_drafting(way)}, the original's are "
        f"{original['fastest']['tokens_per_second']:,.0f}; timed in turns, the prompts' time left out"
    )
    return [
        Headline("smaller on disk", times(ratio), size, _tone(ratio)),
        Headline("change of perplexity", f"{100 * growth:+.2f} %", f"{end}KL {found['kl']:.4f} nats", "good"),
        Headline("the original's speed", times(gain), speed, _tone(gain)),
    ]


def _tone(gain: float) -> str:
    return "good" if gain >= 1 else "bad"


def _budgets(budgets: Budgets, data: Data, best: Data) -> list[tuple[str, str, str]]:
    """(what, asked, the winner's) of each budget."""
    found, way = best["measured"], best["fastest"]
    rows = []
    if (limit := budgets.figure_limit) is not None:
        option = "--quality" if budgets.kl is None else "--kl"
        rows.append((option, budgets.shown(limit), budgets.shown(found["figure"])))
    if budgets.disk is not None:
        rows.append(("--disk", megabytes(budgets.disk), megabytes(found["disk"])))
    if budgets.memory is not None:
        rows.append(("--memory", megabytes(budgets.memory), megabytes(found["memory"])))
    if budgets.latency is not None:
        spent = 1e3 / max(way["tokens_per_second"], 1e-9)
        rows.append(("--latency, a token", f"{budgets.latency:g} ms", f"{spent:.3g} ms"))
    if budgets.ttft is not None:
        prompt = data["about"]["prompt_tokens"]
        rows.append((f"--ttft of {prompt} tokens", f"{budgets.ttft:g} ms", _ms(found["ttft_ms"])))
    return rows


def _candidate(budgets: Budgets, data: Data, place: int, one: Data) -> dict[str, Any]:
    """A row of the table: bytes on disk, of which both figures are the same, (predicted, measured) pairs, a verdict."""
    before, found, way = one["predicted"], one["measured"], one["fastest"]
    pairs = [
        (_mb(before["memory"]), _mb(found["memory"])),
        (_figure(budgets, before["figure"]), _figure(budgets, found["figure"])),
        (f"{before['tokens_per_second']:,.0f}", "not timed" if way is None else f"{way['tokens_per_second']:,.0f}"),
    ]
    chosen = one["key"] == data["winner"]
    verdict = "chosen" if chosen else one["broke"] or "in budget"
    return {
        "number": place,
        "key": one["key"],
        "disk": _mb(found["disk"]),
        "ttft": "not timed" if found["ttft_ms"] is None else _ms(found["ttft_ms"]),
        "pairs": pairs,
        "drafter": _NONE if way is None else _drafter(way),
        "verdict": verdict,
        "tone": "chosen" if chosen else "refused" if one["broke"] else "",
    }


def _figure(budgets: Budgets, figure: float) -> str:
    return f"{figure:.4f}" if budgets.kl is not None else f"{100 * math.expm1(figure):+.2f}"


def _point(budgets: Budgets, one: Data) -> tuple[str, ...]:
    pace = one["pace"]
    drafter = "plain" if pace["drafter"] == PLAIN else _drafter(pace)
    rate = f"{pace['tokens_per_second']:,.0f}"
    return (budgets.shown(one["figure"]), megabytes(one["disk"]), megabytes(one["memory"]), rate, drafter)


def _other_sizes(budgets: Budgets, steps: Sequence[Data]) -> list[str]:
    """What other sizes are predicted to give, in sentences; the page has bars for them."""
    now = next((one for one in steps if one["bytes"] == 0), None)
    told = []
    for one in steps:
        if one["bytes"] == 0 or now is None:
            continue
        much = f"{megabytes(abs(one['bytes']))} {'more' if one['bytes'] > 0 else 'less'} on disk"
        before, after = budgets.shown(now["figure"]), budgets.shown(one["figure"])
        told.append(f"{much}: the least damaging choice goes from {before} to {after}")
    return told


def _worse(budgets: Budgets, worse: Data | None) -> str:
    """What a little more damage is predicted to give."""
    if worse is None:
        return "A tenth more damage: nothing is predicted to keep the other budgets."
    return (
        f"A tenth more damage ({budgets.shown(worse['figure'])}): {megabytes(worse['disk'])} on disk and "
        f"{worse['pace']['tokens_per_second']:,.0f} tokens/s."
    )


def _upgrade(budgets: Budgets, one: Data) -> tuple[str, ...]:
    much = f"{one['per_megabyte']:.3g} nats" if budgets.kl is not None else f"{100 * one['per_megabyte']:.3g} %"
    return (one["unit"], one["before"], one["after"], megabytes(one["bytes"]), much)


def _further(one: Data) -> tuple[str, str]:
    """A stage that may follow: what it does, and what that takes or why it is not offered."""
    if one["why"]:
        return one["does"], f"not offered: {one['why']}"
    more = f", and the model grows by {megabytes(one['disk'])}" if one["disk"] else ""
    # To the minute: it is a forecast.
    minutes = max(round(one["seconds"] / 60), 1)
    return one["does"], f"{one['file']}: about {minutes} min more and {megabytes(one['memory'])} of memory{more}"


def _about(about: Data, cache: str) -> Sequence[tuple[str, str]]:
    return [
        ("evaluation", f"{about['eval_tokens']:,} tokens predicted"),
        ("keys and values", f"{cache}; {about['context']:,} tokens × {about['batch']} requests count as memory"),
        ("damages of layers", _DAMAGES[about["damages"]]),
        ("damage → quality", f"× {about['damage_factor']:.3g}, fitted to the candidates"),
    ]


def _drafting(way: Data) -> str:
    return "plain decoding" if way["drafter"] == PLAIN else f"drafter {_drafter(way)}"


def _drafter(way: Data) -> str:
    """With γ, where it is fixed."""
    return str(way["drafter"]) if way["draft_length"] is None else f"{way['drafter']}, γ {way['draft_length']}"


def _ms(value: float | None) -> str:
    return number(value, 0 if value is not None and value >= 100 else 1, " ms")


def _mb(size: float) -> str:
    return f"{size / 1e6:,.2f}" if size < 1e8 else f"{size / 1e6:,.0f}"
