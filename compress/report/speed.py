"""Speed of original, compressed and speculative decoding in one runtime, interleaved; acceptance; advice."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.progress import Progress
from compress.report.advice import advise, fit_acceptance, iid_speedup
from compress.report.schema import covers, null_paths
from runtime.contract import Rows
from runtime.engine.metrics import Metrics, predicted_speedup, total
from runtime.errors import UserError
from runtime.sampling.detokenize import require_same_vocabulary
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator, lossless_class
from runtime.speculative.costs import StepCosts, measure_costs
from runtime.speculative.draft import Drafter
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import MedusaDrafter

if TYPE_CHECKING:
    from runtime.model.load import Model


REPEATS = 3
# Timed repeats stop when this much is spent (the first one always ends), and forwards are timed for that much.
TIMING_SECONDS, COST_SECONDS = 45.0, 5.0
_CONTEXT = 128  # tokens before the timed forwards
_AGREEMENT_TOKENS = 2048
_WARM_UP_TOKENS = 6
_TEACHER_FORCED = ("speed.teacher_forced_agreement", "speed.teacher_forced_agreement_t1")
_CHAIN_ONLY = ("speed.per_token_acceptance", "speed.iid_speedup", "speed.advice")
_NO_ENERGY = "no energy counter was read"
NO_SPEED = "speed was not measured (--no-speed)"


@dataclass
class Timed:
    """All runs of one way of decoding: per repeat and prompt its new tokens and its metrics."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    metrics: list[list[Metrics]] = field(default_factory=list)

    @property
    def overall(self) -> Metrics:
        """The sum over prompts and repeats."""
        return total([m for repeat in self.metrics for m in repeat])

    def median(self, rate: Callable[[Metrics], float | None]) -> float | None:
        """The median over repeats of a figure of all prompts together."""
        found = [value for value in (rate(total(repeat)) for repeat in self.metrics) if value is not None]
        return statistics.median(found) if found else None

    def figures(self) -> dict[str, Any]:
        """One of `speed.original`, `.compressed`, `.speculative` of report.json."""
        return {
            **self.overall.report(),
            "tokens_per_second": self.median(lambda m: m.tokens_per_second),
            "decode_tokens_per_second": self.median(lambda m: m.decode_tokens_per_second),
            "energy_j": None,
        }


@dataclass(frozen=True)
class SpeedResult:
    """The `speed` and `lossless` sections, and why some of their figures are null (path: reason)."""

    speed: dict[str, Any]
    lossless: dict[str, Any]
    not_measured: dict[str, str]


def time_interleaved(
    ways: dict[str, Speculator], prompts: Sequence[Sequence[int]], new_tokens: int, progress: Progress
) -> dict[str, Timed]:
    """Decodes every prompt greedily in every way, one after the other, in an order that rotates.

    Exactly `new_tokens` each (no stop tokens), after a warm-up. Up to 3 repeats within the time there is.
    """
    names = list(ways)
    for way in ways.values():
        way.generate([prompts[0]], max_new_tokens=_WARM_UP_TOKENS, stop=())
    timed = {name: Timed() for name in names}
    started = time.perf_counter()
    longest = 0.0
    for repeat in range(REPEATS):
        before = time.perf_counter()
        if repeat and before - started + longest > TIMING_SECONDS:
            break
        for one in timed.values():
            one.tokens.append([])
            one.metrics.append([])
        for index, prompt in enumerate(prompts):
            progress("speed", repeat * len(prompts) + index, REPEATS * len(prompts))
            shift = (repeat + index) % len(names)
            for name in names[shift:] + names[:shift]:
                [result] = ways[name].generate([prompt], max_new_tokens=new_tokens, stop=())
                timed[name].tokens[-1].append(result.tokens)
                timed[name].metrics[-1].append(result.metrics)
        longest = max(longest, time.perf_counter() - before)
    progress("speed", REPEATS * len(prompts), REPEATS * len(prompts))
    return timed


def compare(reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(tokens compared, positions that differ) of two lists of texts; a missing token differs."""
    compared = mismatches = 0
    for ours, theirs in zip(reference, other, strict=True):
        length = max(len(ours), len(theirs))
        compared += length
        mismatches += length - sum(a == b for a, b in zip(ours, theirs, strict=False))
    return compared, mismatches


def repeated_share(texts: Sequence[Sequence[int]], n: int = 4) -> float | None:
    """1 − distinct / all n-grams within each text, over all texts (seq-rep-4 of Welleck et al., 1908.04319)."""
    every = distinct = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        every += len(grams)
        distinct += len(set(grams))
    return 1 - distinct / every if every else None


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


def groups(plain: Timed, speculative: Timed) -> list[dict[str, Any]]:
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
        fast, slow = ours.tokens_per_second, base.tokens_per_second
        out.append(
            {
                "name": name,
                "prompts": len(members),
                "repeated_4gram_share": repeated_share([texts[i] for i in members]),
                "acceptance_rate": ours.acceptance_rate,
                "tokens_per_round": ours.tokens_per_round,
                "speedup_over_compressed": fast / slow if fast and slow else None,
            }
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
    figures that only a chain has. Where the target cannot be rolled back, or γ = 0, the speculative figures are null
    with that reason. Raises UserError for a draft with another vocabulary.
    """
    tree = isinstance(draft, MedusaDrafter)
    model = None if draft is None or isinstance(draft, MedusaDrafter) else draft
    drafter: Model | Drafter = LookupDrafter() if draft is None else draft
    if model is not None:
        # The runtime would encode such a draft's text again; the report's agreement figures need one vocabulary.
        require_same_vocabulary(compressed.tokenizer, model.tokenizer)
    missing: dict[str, str] = {"speed.*.energy_j": _NO_ENERGY}
    ways = {"original": Speculator(original), "compressed": Speculator(compressed)}
    reason = "the draft length is 0" if draft_length == 0 else _cannot_roll_back(compressed, prompts[0])
    if reason is None:
        ways["speculative"] = Speculator(compressed, drafter, draft_length)
    timed = time_interleaved(ways, prompts, new_tokens, progress)
    speed: dict[str, Any] = empty_speed()
    speed |= {
        "prompts": len(prompts),
        "new_tokens": new_tokens,
        "repeats": len(timed["original"].metrics),
        "threads": compressed.decoder.threads,
        "repeated_4gram_share": repeated_share(timed["compressed"].tokens[0]),
        "draft_length": draft_length,
        "drafter": None if reason else ways["speculative"].drafter.name,
        "original": timed["original"].figures(),
        "compressed": timed["compressed"].figures(),
    }
    lossless: dict[str, Any] = {"class": None, "verify": None, "tokens_compared": None, "mismatches": None}
    if reason is not None:
        missing |= dict.fromkeys((*SPECULATIVE_PATHS, "lossless"), reason)
        return SpeedResult(speed, lossless, missing | _too_short(speed, missing))
    spoken = timed["speculative"]
    text = _context(compressed, model, prompts, spoken.tokens[0])
    costs = measure_costs(compressed, text, draft_length, COST_SECONDS)
    speed |= _speculative_figures(timed, costs, draft_length, tree)
    if tree:
        missing |= dict.fromkeys(_CHAIN_ONLY, "a tree was drafted, and the figure is a chain's")
    hot = ways["speculative"].generate(prompts, new_tokens, Sampling(temperature=1.0, seed=seed), stop=())
    speed["acceptance_rate_t1"] = total([result.metrics for result in hot]).acceptance_rate
    speed["acceptance_rate_t1_verify"] = ways["speculative"].verify
    if model is None:
        no_prediction = f"{ways['speculative'].drafter.name} is no model that predicts a token at every position"
        missing |= dict.fromkeys(_TEACHER_FORCED, no_prediction)
    else:
        agreement = teacher_forced_agreement(compressed, model, windows)
        speed["teacher_forced_agreement"], speed["teacher_forced_agreement_t1"] = agreement
    compared, mismatches = compare(timed["compressed"].tokens[0], spoken.tokens[0])
    lossless = {
        "class": lossless_class(compressed, ways["speculative"].verify, Sampling()),
        "verify": "greedy",
        "tokens_compared": compared,
        "mismatches": mismatches,
    }
    return SpeedResult(speed, lossless, missing | _too_short(speed, missing))


def _too_short(speed: dict[str, Any], missing: dict[str, str]) -> dict[str, str]:
    """Reasons for figures that so few tokens, or a drafter that proposed none, cannot give; baselines come later."""
    bare = [f"speed.{path}" for path in null_paths(speed) if path != "baselines"]
    unexplained = [path for path in bare if not any(covers(reason, path) for reason in missing)]
    return dict.fromkeys(unexplained, "too few tokens were decoded or drafted to tell")


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


def _context(
    compressed: "Model", draft: "Model | None", prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[int]:
    """A text of at most 128 tokens to time forwards after, that leaves both models room for the widest one."""
    text = [token for prompt, new in zip(prompts, texts, strict=True) for token in (*prompt, *new)]
    positions = min(m.decoder.max_positions for m in (compressed, draft) if m is not None)
    return text[: max(1, min(_CONTEXT, positions // 2))]


def _speculative_figures(timed: dict[str, Timed], costs: StepCosts, draft_length: int, tree: bool) -> dict[str, Any]:
    plain, spoken = timed["compressed"], timed["speculative"]
    # Greedy decoding repeats itself exactly, so one repeat holds all the acceptance there is.
    counts = total(spoken.metrics[0])
    rate, base, start = (
        timed[name].median(lambda m: m.tokens_per_second) for name in ("speculative", "compressed", "original")
    )
    decode = [one.median(lambda m: m.decode_tokens_per_second) for one in (spoken, plain)]
    step = plain.overall.step_seconds
    c = spoken.overall.draft_cost_ratio(step) if step else None
    v = costs.widths.get(draft_length + 1)
    survival, tau, alpha = counts.accepted_by_position, counts.tokens_per_round, counts.acceptance_rate
    if tree and counts.rounds:
        # Several nodes stand at a depth, of which one at most is accepted: what counts is how often one was.
        survival = [hits / counts.rounds for hits in counts.accepted_at]
    figures: dict[str, Any] = {
        "speculative": spoken.figures(),
        "acceptance_rate": alpha,
        "accepted_by_position": survival or None,
        "tokens_per_round": tau,
        "draft_cost_ratio": c,
        "width_cost_ratio": v,
        "width_costs": [{"width": w, "ms": costs.target_ms[w], "ratio": costs.widths[w]} for w in costs.widths],
        "speedup": {
            "over_compressed": rate / base if rate and base else None,
            "over_original": rate / start if rate and start else None,
            "decode_over_compressed": decode[0] / decode[1] if decode[0] and decode[1] else None,
            "compressed_over_original": base / start if base and start else None,
        },
        "groups": groups(plain, spoken),
    }
    if alpha is not None and tau is not None and c is not None and v is not None:
        figures["predicted_speedup"] = predicted_speedup(tau, draft_length, c, v)
        if tree:
            return figures
        p = fit_acceptance(survival)
        figures["per_token_acceptance"] = p
        figures["iid_speedup"] = iid_speedup(p, draft_length, c, v)
        figures["advice"] = advise(alpha, survival, c, costs.widths).as_dict()
    return figures


_SPECULATIVE_KEYS = (
    "speculative",
    "drafter",
    "acceptance_rate",
    "acceptance_rate_t1",
    "acceptance_rate_t1_verify",
    "per_token_acceptance",
    "teacher_forced_agreement",
    "teacher_forced_agreement_t1",
    "accepted_by_position",
    "tokens_per_round",
    "draft_cost_ratio",
    "width_cost_ratio",
    "width_costs",
    "predicted_speedup",
    "iid_speedup",
    "speedup",
    "groups",
    "advice",
)
SPECULATIVE_PATHS = tuple(f"speed.{key}" for key in _SPECULATIVE_KEYS)


def empty_speed() -> dict[str, Any]:
    """The `speed` section with every key null."""
    keys = ("prompts", "new_tokens", "repeats", "threads", "repeated_4gram_share", "draft_length", "baselines")
    return dict.fromkeys((*keys, "original", "compressed", *_SPECULATIVE_KEYS))


def not_measured(reason: str = NO_SPEED) -> SpeedResult:
    """What `--no-speed` leaves: every key null, with the reason."""
    lossless = dict.fromkeys(("class", "verify", "tokens_compared", "mismatches"))
    return SpeedResult(empty_speed(), lossless, {"speed": reason, "lossless": reason})
