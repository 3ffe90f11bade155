"""Speed of original, compressed and speculative decoding in one runtime, interleaved; acceptance; advice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.progress import Progress
from compress.report.advice import advise, fit_acceptance, iid_speedup
from compress.report.not_measured import NO_SPEED, TOO_FEW, Reasons, covers, null_paths
from compress.report.schema_speed import Group, Lossless, PlainSpeed, Speculation, Speed, Speedup, WidthCost
from compress.report.timing import Timed, compare, repeated_share, time_interleaved
from runtime.contract import Rows
from runtime.engine.metrics import predicted_speedup, total
from runtime.errors import UserError
from runtime.sampling.detokenize import require_same_vocabulary
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator, lossless_class
from runtime.speculative.costs import StepCosts, measure_costs
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import MedusaDrafter

if TYPE_CHECKING:
    from runtime.model.load import Model

COST_SECONDS = 5.0  # for timing forwards of several widths
_CONTEXT = 128  # tokens before the timed forwards
_AGREEMENT_TOKENS = 2048
_NOT_SPECULATED = Speculation(**dict.fromkeys(Speculation.model_fields))
_NOT_COMPARED = Lossless(**dict.fromkeys(Lossless.model_fields))
_TEACHER_FORCED = ("speed.teacher_forced_agreement", "speed.teacher_forced_agreement_t1")
_CHAIN_ONLY = ("speed.per_token_acceptance", "speed.iid_speedup", "speed.advice")


@dataclass(frozen=True)
class SpeedResult:
    """The `speed` and `lossless` sections, and why some of their figures are null."""

    speed: Speed
    lossless: Lossless
    not_measured: Reasons


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


def groups(plain: Timed, speculative: Timed) -> list[Group]:
    """The prompts in two halves by how much their output repeats itself: repetition is easy to draft."""
    texts = plain.tokens[0]
    order = sorted(range(len(texts)), key=lambda i: (repeated_share([texts[i]]) or 0.0, i))
    if len(order) < 2:
        return []
    halves = {"less repetitive half": order[: len(order) // 2], "more repetitive half": order[len(order) // 2 :]}
    out = []
    for name, members in halves.items():
        ours = total([repeat[i] for repeat in speculative.metrics for i in members])
        base = total([repeat[i] for repeat in plain.metrics for i in members])
        out.append(
            Group(
                name=name,
                prompts=len(members),
                repeated_4gram_share=repeated_share([texts[i] for i in members]),
                acceptance_rate=ours.acceptance_rate,
                tokens_per_round=ours.tokens_per_round,
                speedup_over_compressed=_ratio(ours.tokens_per_second, base.tokens_per_second),
            )
        )
    return out


def measure(
    original: "Model",
    compressed: "Model",
    draft: "Model | MedusaDrafter | None",
    prompts: Sequence[Sequence[int]],
    windows: torch.Tensor,
    new_tokens: int,
    draft_length: int,
    progress: Progress,
    seed: int = 0,
) -> SpeedResult:
    """Everything of `speed` but the baselines, and `lossless`.

    prompts  token lists, short enough for `new_tokens` more. windows (E, L) held-out tokens for teacher forcing.
    Without `draft` the drafter is prompt lookup. Medusa heads draft a tree, of which γ counts the nodes, and have no
    figures that only a chain has. Where the target cannot be rolled back the speculative figures are null
    with that reason. Raises UserError for a draft with another vocabulary.
    """
    model = None if draft is None or isinstance(draft, MedusaDrafter) else draft
    if model is not None:
        # The runtime would encode such a draft's text again; the report's agreement figures need one vocabulary.
        require_same_vocabulary(compressed.tokenizer, model.tokenizer)
    ways = {"original": Speculator(original), "compressed": Speculator(compressed)}
    reason = _cannot_roll_back(compressed, prompts[0])
    if reason is None:
        ways["speculative"] = Speculator(compressed, LookupDrafter() if draft is None else draft, draft_length)
    timed = time_interleaved(ways, prompts, new_tokens, progress)
    plain = PlainSpeed(
        prompts=len(prompts),
        new_tokens=new_tokens,
        repeats=len(timed["original"].metrics),
        threads=compressed.decoder.threads,
        repeated_4gram_share=repeated_share(timed["compressed"].tokens[0]),
        draft_length=draft_length,
        baselines=None,
        original=timed["original"].figures(),
        compressed=timed["compressed"].figures(),
    )
    missing: Reasons = {"speed.*.energy_j": "no energy counter was read"}
    speculation, lossless = _NOT_SPECULATED, _NOT_COMPARED
    if reason is not None:
        missing |= dict.fromkeys((*(f"speed.{name}" for name in Speculation.model_fields), "lossless"), reason)
    else:
        spoken = timed["speculative"].tokens[0]
        text = [token for prompt, new in zip(prompts, spoken, strict=True) for token in (*prompt, *new)]
        # To time forwards after; it leaves both models room for the widest one.
        positions = min(m.decoder.max_positions for m in (compressed, model) if m is not None)
        text = text[: max(1, min(_CONTEXT, positions // 2))]
        if isinstance(draft, MedusaDrafter):
            missing |= dict.fromkeys(_CHAIN_ONLY, "a tree was drafted, and the figure is a chain's")
        if model is None:
            drafter = ways["speculative"].drafter.name
            no_prediction = f"{drafter} is no model that predicts a token at every position"
            missing |= dict.fromkeys(_TEACHER_FORCED, no_prediction)
        costs = measure_costs(compressed, text, draft_length, COST_SECONDS)
        hot = ways["speculative"].generate(prompts, new_tokens, Sampling(temperature=1.0, seed=seed), stop=())
        speculation = _speculation(
            timed,
            ways["speculative"],
            costs,
            total([result.metrics for result in hot]).acceptance_rate,
            (None, None) if model is None else teacher_forced_agreement(compressed, model, windows),
        )
        compared, mismatches = compare(timed["compressed"].tokens[0], spoken)
        lossless = Lossless(
            class_=lossless_class(compressed, ways["speculative"].verify, Sampling()),
            verify="greedy",
            tokens_compared=compared,
            mismatches=mismatches,
        )
    speed = Speed(**dict(plain), **dict(speculation))
    # Figures that so few tokens, or a drafter that proposed none, cannot give; baselines come later.
    bare = [f"speed.{path}" for path in null_paths(speed.model_dump()) if path != "baselines"]
    too_few = {path: TOO_FEW for path in bare if not any(covers(reason, path) for reason in missing)}
    return SpeedResult(speed, lossless, missing | too_few)


def not_measured() -> SpeedResult:
    """What `--no-speed` leaves: every key null, with the reason."""
    nothing = Speed(**dict.fromkeys(Speed.model_fields))
    return SpeedResult(nothing, _NOT_COMPARED, {"speed": NO_SPEED, "lossless": NO_SPEED})


def _cannot_roll_back(target: "Model", prompt: Sequence[int]) -> str | None:
    """Why what follows a token cannot be taken out of the target's cache again (a recurrent state, say), or None."""
    cache = target.decoder.new_cache()
    tokens = torch.tensor([prompt[0], prompt[-1]])
    handle = cache.open(len(tokens))
    target.decoder.forward(tokens, Rows.chains([(handle, 0, len(tokens))]), cache)
    try:
        cache.truncate(handle, 1)
    except UserError as error:
        return str(error)
    return None


def _speculation(
    timed: dict[str, Timed],
    speculator: Speculator,
    costs: StepCosts,
    hot_acceptance: float | None,
    agreement: tuple[float | None, float | None],
) -> Speculation:
    plain, spoken, draft_length = timed["compressed"], timed["speculative"], speculator.draft_length
    tree = isinstance(speculator.drafter, MedusaDrafter)
    assert draft_length is not None  # `measure` gave one
    # Greedy decoding repeats itself exactly, so one repeat holds all the acceptance there is.
    counts = total(spoken.metrics[0])
    rates = {name: one.median(lambda m: m.tokens_per_second) for name, one in timed.items()}
    decode = [one.median(lambda m: m.decode_tokens_per_second) for one in (spoken, plain)]
    step = plain.overall.step_seconds
    c = spoken.overall.draft_cost_ratio(step) if step else None
    v = costs.widths.get(draft_length + 1)
    survival, tau, alpha = counts.accepted_by_position, counts.tokens_per_round, counts.acceptance_rate
    if tree and counts.rounds:
        # Several nodes stand at a depth, of which one at most is accepted: what counts is how often one was.
        survival = [hits / counts.rounds for hits in counts.accepted_at]
    predicted = p = expected = advice = None
    if alpha is not None and tau is not None and c is not None and v is not None:
        predicted = predicted_speedup(tau, draft_length, c, v)
        if not tree:
            p = fit_acceptance(survival)
            expected, advice = iid_speedup(p, draft_length, c, v), advise(alpha, survival, c, costs.widths)
    return Speculation(
        speculative=spoken.figures(),
        drafter=speculator.drafter.name,
        acceptance_rate=alpha,
        acceptance_rate_t1=hot_acceptance,
        acceptance_rate_t1_verify=speculator.verify,
        per_token_acceptance=p,
        teacher_forced_agreement=agreement[0],
        teacher_forced_agreement_t1=agreement[1],
        accepted_by_position=survival or None,
        tokens_per_round=tau,
        draft_cost_ratio=c,
        width_cost_ratio=v,
        width_costs=[WidthCost(width=w, ms=costs.target_ms[w], ratio=ratio) for w, ratio in costs.widths.items()],
        predicted_speedup=predicted,
        iid_speedup=expected,
        speedup=Speedup(
            over_compressed=_ratio(rates["speculative"], rates["compressed"]),
            over_original=_ratio(rates["speculative"], rates["original"]),
            decode_over_compressed=_ratio(*decode),
            compressed_over_original=_ratio(rates["compressed"], rates["original"]),
        ),
        groups=groups(plain, spoken),
        advice=advice,
    )


def _ratio(fast: float | None, slow: float | None) -> float | None:
    return fast / slow if fast and slow else None
