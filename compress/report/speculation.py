"""The figures of the report's `speed` section on speculation: the winner's pace, all else of the fastest drafter."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from compress.report.advice import advise, iid_speedup, settled
from compress.report.pairing import ORIGINAL, Contest, Costs, is_tree
from compress.report.schema_speed import PLAIN, Advice, Group, Speculation, Speedup, WidthCost
from compress.report.timing import Timed, repeated_share
from runtime.contract import Rows
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator
from runtime.speculative.costs import StepCosts

if TYPE_CHECKING:
    from runtime.model.load import Model

_AGREEMENT_TOKENS = 2048
_OFTEN = 0.05  # of the drafts: positions that fewer reach are not told of
Agreement = tuple[float | None, float | None]


def teacher_forced_agreement(target: "Model", draft: "Model", windows: torch.Tensor) -> tuple[float, float]:
    """How well the draft predicts the target after each token of (E, L) windows of held-out text.

    Returns the share of positions at which both have the same most probable token, and the mean of Σ min(p, q): the
    chance that Leviathan's rule (2211.17192) accepts a token drawn at temperature 1.
    """
    agreed = overlap = 0.0
    seen = 0
    # A draft may have fewer positions than the target that the windows were cut for, and fewer logits.
    windows = windows[:, : min(target.decoder.max_positions, draft.decoder.max_positions)]
    for window in windows[: max(1, _AGREEMENT_TOKENS // windows.shape[1])]:
        rows = []
        for model in (target, draft):
            cache = model.decoder.new_cache()
            handle = cache.open(len(window))
            rows.append(model.decoder.forward(window, Rows.chains([(handle, 0, len(window))]), cache).logits.cpu())
            cache.close(handle)
        agreed += float((rows[0].argmax(dim=-1) == rows[1].argmax(dim=-1)).sum())
        width = min(row.shape[1] for row in rows)
        p, q = (torch.softmax(row, dim=-1)[:, :width] for row in rows)
        overlap += float(torch.minimum(p, q).sum())
        seen += len(window)
    return agreed / seen, overlap / seen


def groups(plain: Timed, speculative: Timed, names: Sequence[str] = ()) -> list[Group]:
    """Some of the prompts together: those of each task, where `names` has one for each prompt.

    Otherwise two halves by how much their output repeats itself: repetition is easy to draft.
    """
    texts = plain.tokens[0]
    members: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        members.setdefault(name, []).append(place)
    if not names and len(texts) > 1:
        order = sorted(range(len(texts)), key=lambda i: (repeated_share([texts[i]]) or 0.0, i))
        half = len(order) // 2
        members = {"less repetitive half": order[:half], "more repetitive half": order[half:]}
    return [_group(name, plain.only(places), speculative.only(places)) for name, places in members.items()]


def _group(name: str, plain: Timed, ours: Timed) -> Group:
    return Group(
        name=name,
        prompts=len(plain.tokens[0]),
        repeated_4gram_share=repeated_share(plain.tokens[0]),
        acceptance_rate=ours.overall.acceptance_rate,
        tokens_per_round=ours.typical.tokens_per_round,
        speedup_over_compressed=_ratio(ours.tokens_per_second, plain.tokens_per_second),
    )


def without_drafts(contest: Contest) -> Speculation:
    """Where nobody drafts: plain decoding is the best there is."""
    nothing: dict[str, Any] = dict.fromkeys(Speculation.model_fields)
    plain = contest.timed[PLAIN]
    said: dict[str, Any] = {"speculative": plain.figures(), "pairings": contest.rows({}), "drafter": PLAIN}
    return Speculation(**{**nothing, **said, "speedup": _speedup(contest), "groups": []})


def speculation(
    contest: Contest, costs: StepCosts, hot: float | None, agreement: Agreement, names: Sequence[str], fixed: int | None
) -> Speculation:
    """Of a contest in which somebody drafts.

    hot        α at temperature 1; agreement: what `teacher_forced_agreement` gives, where there is a draft model.
    names      the prompts' groups. fixed: γ where one was asked for.
    """
    name = contest.fastest
    assert name is not None
    plain, ours, rows = contest.timed[PLAIN], contest.timed[name], contest.rows(costs.widths)
    counts, tree = ours.overall, is_tree(name)
    found = Costs.of(ours.typical, plain.typical, costs.widths)
    # Where γ is chosen few drafts go far, and what became of those says little.
    often = [tried >= _OFTEN * counts.drafted_at[0] for tried in counts.drafted_at]
    survival = [share for share, kept in zip(counts.accepted_by_position, often, strict=True) if kept]
    alpha = counts.acceptance_rate
    if tree and counts.rounds:
        # Several nodes stand at a depth, of which one at most is accepted: what counts is how often one was.
        survival = [hits / counts.rounds for hits in counts.accepted_at]
    p = expected = advice = None
    gamma, c, v = found.draft_length, found.draft_cost, found.width_cost
    if alpha is not None and gamma is not None:
        row = next(row for row in rows if row.drafter == name)
        length = draft_length(contest, fixed) if contest.winner != PLAIN else 0
        advice = settled(row, length or 0, fixed is None)
        if not tree and c is not None and v is not None:
            p = counts.per_token_acceptance
            assert p is not None
            expected = iid_speedup(p, gamma, c, v)
            if fixed is not None:
                advice = _by_costs(advise(alpha, survival, c, costs.widths), advice, fixed)
    return Speculation(
        speculative=contest.timed[contest.winner].figures(),
        pairings=rows,
        drafter=contest.winner,
        fastest_drafter=name,
        mean_draft_length=gamma,
        acceptance_rate=alpha,
        acceptance_rate_t1=hot,
        acceptance_rate_t1_verify=contest.ways[name].verify,
        per_token_acceptance=p,
        teacher_forced_agreement=agreement[0],
        teacher_forced_agreement_t1=agreement[1],
        accepted_by_position=survival or None,
        tokens_per_round=ours.typical.tokens_per_round,
        draft_cost_ratio=c,
        width_cost_ratio=v,
        width_costs=[WidthCost(width=w, ms=costs.target_ms[w], ratio=ratio) for w, ratio in costs.widths.items()],
        predicted_speedup=found.speedup,
        iid_speedup=expected,
        speedup=_speedup(contest),
        groups=groups(plain, ours, names),
        advice=advice,
    )


def draft_length(contest: Contest, fixed: int | None) -> int | None:
    """γ of the fastest drafter as a whole number: what was asked for, or the mean over the rounds that drafted."""
    if contest.fastest is None:
        return None
    counts = contest.timed[contest.fastest].overall
    drafting = sum(counts.draft_lengths[1:])
    return fixed or (max(1, round(counts.drafted / drafting)) if drafting else 1)


def acceptance_when_sampling(
    way: Speculator, prompts: Sequence[Sequence[int]], work: tuple[int, int, int]
) -> float | None:
    """α at temperature 1. work: new tokens, γ (a controller may draft nothing where requests share forwards), seed."""
    new_tokens, gamma, seed = work
    hot = Speculator(way.target, way.drafter, gamma, way.verify)
    results = hot.generate(prompts, new_tokens, Sampling(temperature=1.0, seed=seed), stop=())
    drafted, accepted = (sum(getattr(result.metrics, name) for result in results) for name in ("drafted", "accepted"))
    return accepted / drafted if drafted else None


def _by_costs(advice: Advice, measured: Advice, fixed: int) -> Advice:
    """Advice on other draft lengths than the one that was timed, unless the measurement says otherwise."""
    agrees = bool(advice.draft_length) if measured.draft_length else advice.draft_length != fixed
    return advice if agrees else measured


def _speedup(contest: Contest) -> Speedup:
    best, plain, original = (contest.timed[name] for name in (contest.winner, PLAIN, ORIGINAL))
    rates = [one.tokens_per_second for one in (best, plain, original)]
    return Speedup(
        over_compressed=_ratio(rates[0], rates[1]),
        over_original=_ratio(rates[0], rates[2]),
        decode_over_compressed=_ratio(best.decode_tokens_per_second, plain.decode_tokens_per_second),
        compressed_over_original=_ratio(rates[1], rates[2]),
    )


def _ratio(fast: float | None, slow: float | None) -> float | None:
    return fast / slow if fast and slow else None
