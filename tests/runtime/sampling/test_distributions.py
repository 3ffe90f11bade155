"""Both sampling rules keep the target's distribution with every kind of draft: enumerated, drawn, and end to end.

Enumerated: every choice that the real code makes at random is taken every way, with its probability, so the output's
distribution is exact. Drawn: chi-squared over rounds of drafting and verifying. End to end: chi-squared over texts of
several rounds. Each harness fails on a rule that was broken on purpose.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.checkpoints.medusa import Description
from runtime.sampling.candidates import Candidates, drawn, ranked
from runtime.sampling.noise import Stream, exponential, pick, race, uniforms
from runtime.sampling.params import Sampling
from runtime.speculate import Speculator
from runtime.speculative import verify
from runtime.speculative.draft import Draft
from runtime.speculative.drafters.lookup import LookupDrafter
from runtime.speculative.drafters.medusa import Head, Heads, MedusaDrafter
from runtime.speculative.drafters.model import ModelDrafter
from runtime.speculative.drafters.suffix import SuffixDrafter
from runtime.speculative.drafters.tree import TreeDrafter
from runtime.speculative.drafters.tree_growth import (
    ROOT,
    DrawnTree,
    Growing,
    Growth,
    RankedTree,
    ShapedTree,
    Tree,
    TreeShape,
)
from runtime.speculative.verify import Acceptance, Rule, coupled, rejection
from tests.probabilities import probabilities

Row = np.ndarray
Choose = Callable[[Sequence[float]], int]
ChiSquared = Callable[[np.ndarray, np.ndarray], float]
STATIC = TreeShape((2, 2, 1))
DYNAMIC = Growth(depth=3, width=2, branch=3)


def grown(growing: Growing, candidates: Callable[[Tree, int], Candidates]) -> Draft:
    """The draft of a tree whose nodes get their candidates from a function, as TreeDrafter makes it."""
    wanted = [ROOT]
    while wanted:
        wanted = growing.expand({node: candidates(growing.tree, node) for node in wanted})
    tree, nodes = growing.tree, growing.draft_nodes()
    number = {node: i for i, node in enumerate(nodes)} | {ROOT: -1}
    probs = None
    if tree.candidates[ROOT].row is not None:
        probs = torch.tensor(np.array([tree.proposal(node) for node in nodes]))
    return Draft([tree.tokens[n] for n in nodes], [number[tree.parents[n]] for n in nodes], probs)


# Enumerated.


class Choices:
    """Makes the choices of one run: first those that are given, then the first possible one each time."""

    def __init__(self, given: list[int]) -> None:
        self.given = given
        self.made: list[tuple[int, int]] = []  # index among the possible ones, and their number
        self.weight = 1.0

    def __call__(self, odds: Sequence[float]) -> int:
        possible = [i for i, odd in enumerate(odds) if odd > 0]
        index = self.given[len(self.made)] if len(self.made) < len(self.given) else 0
        self.made.append((index, len(possible)))
        self.weight *= odds[possible[index]]
        return possible[index]

    def following(self) -> list[int] | None:
        """The choices to give to the next run; None after the last one."""
        made = list(self.made)
        while made and made[-1][0] == made[-1][1] - 1:
            made.pop()
        return [*(index for index, _ in made[:-1]), made[-1][0] + 1] if made else None


def every_way(run: Callable[[Choose], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The distribution of run(choose), which makes all its random choices by choose(probabilities)."""
    totals: dict[tuple[int, ...], float] = {}
    given: list[int] | None = []
    while given is not None:
        choices = Choices(given)
        outcome = run(choices)
        totals[outcome] = totals.get(outcome, 0.0) + choices.weight
        given = choices.following()
    return totals


class Coin:
    """A uniform number that does not know its value: a comparison goes either way, with the right odds."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    def __lt__(self, bound: float) -> bool:
        accepted = min(1.0, float(bound))
        return self.choose([accepted, 1 - accepted]) == 0


def enumerated_rejection(
    monkeypatch: pytest.MonkeyPatch, p: np.ndarray, propose: Callable[[Choose], Draft]
) -> np.ndarray:
    """(V, V) the distribution of a round's first two tokens; p (depths, V) is the target at each depth.

    Where a round has one token only, the next one is the target's, whatever came before.
    """

    def run(choose: Choose) -> tuple[int, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(verify, "uniforms", lambda seed, at, stream, count: [Coin(choose)] * count)
            patch.setattr(verify, "pick", lambda row, uniform: choose(row / row.sum()))
            draft = propose(choose)
            depth = [0, *(d + 1 for d in draft.depths)]
            verdict = rejection(torch.tensor(p[depth]), draft, 10, 0)
        out = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
        return (out[0], out[1]) if len(out) > 1 else (out[0],)

    size = p.shape[1]
    joint = np.zeros((size, size))
    for outcome, weight in every_way(run).items():
        if len(outcome) == 2:
            joint[outcome] += weight
        else:
            joint[outcome[0]] += weight * p[1]
    return joint


def drawing(choose: Choose, q: np.ndarray, branch: int) -> Callable[[Tree, int], Candidates]:
    """Candidates drawn without replacement by `choose`; q (depths, V) is the draft at each depth."""

    def candidates(tree: Tree, node: int) -> Candidates:
        row = q[tree.depth(node)]
        orders = list(itertools.permutations(range(len(row)), min(branch, len(row))))
        odds = []
        for order in orders:
            left, odd = 1.0, 1.0
            for token in order:
                odd *= row[token] / left
                left -= row[token]
            odds.append(odd)
        order = orders[choose(odds)]
        noise = np.full(len(row), 1e9)
        for rank, token in enumerate(order):
            noise[token] = row[token] * 2.0**rank
        found = drawn(row, noise, branch)
        assert found.tokens == list(order)
        return found

    return candidates


P3 = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.25, 0.25, 0.5], [0.6, 0.3, 0.1]])
Q3 = np.array([[0.1, 0.2, 0.7], [0.8, 0.05, 0.15], [0.3, 0.4, 0.3], [0.1, 0.3, 0.6]])
Plans = dict[str, tuple[Callable[[], Growing], int]]
PLANS: Plans = {
    "chain": (lambda: ShapedTree(TreeShape((1, 1, 1)), 3, 9), 1),
    "static": (lambda: ShapedTree(STATIC, 5, 9), 2),
    "static, all siblings": (lambda: ShapedTree(TreeShape((3, 2)), 5, 9), 3),
    "static, cut": (lambda: ShapedTree(STATIC, 3, 9), 2),
    "dynamic": (lambda: DrawnTree(Growth(2, 2, 2), 4, 9), 2),
    "dynamic, deep": (lambda: DrawnTree(Growth(3, 1, 2), 4, 9), 2),
    "dynamic, all siblings": (lambda: DrawnTree(Growth(2, 1, 3), 4, 9), 3),
}


@pytest.mark.parametrize("plan", PLANS)
def test_rejection_is_exact_with_draws(monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    make, branch = PLANS[plan]
    expected = np.outer(P3[0], P3[1])
    joint = enumerated_rejection(monkeypatch, P3, lambda choose: grown(make(), drawing(choose, Q3, branch)))
    assert np.abs(joint - expected).max() < 1e-12


@pytest.mark.parametrize("tokens", [[2, 0, 1, 2, 0], [0, 1, 0, 1, 0]])
def test_rejection_is_exact_with_tokens_that_are_no_draws(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    for draft in (Draft(tokens, [-1, 0, 1, 2, 3]), Draft(tokens, [-1, -1, 0, 0, 1])):
        joint = enumerated_rejection(monkeypatch, np.vstack([P3, P3]), lambda choose, draft=draft: draft)  # type: ignore[misc]
        assert np.abs(joint - np.outer(P3[0], P3[1])).max() < 1e-12


class PrunedTree(DrawnTree):
    """The mistake: a larger tree, of which the least probable draws are thrown away."""

    def draft_nodes(self) -> list[int]:
        joints = self.tree.joints
        return sorted(sorted(range(len(joints)), key=lambda node: (-joints[node], node))[:3])


def test_pruning_by_what_was_drawn_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(choose: Choose) -> Draft:
        return grown(PrunedTree(Growth(2, 2, 2), 4, 9), drawing(choose, Q3, 2))

    joint = enumerated_rejection(monkeypatch, P3, propose)
    assert joint.sum() == pytest.approx(1) and np.abs(joint - np.outer(P3[0], P3[1])).max() > 1e-3


def test_siblings_without_their_own_distributions_are_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws without replacement that are handed over as if each came from q."""

    def propose(choose: Choose) -> Draft:
        draft = grown(ShapedTree(STATIC, 5, 9), drawing(choose, Q3, 2))
        return Draft(draft.tokens, draft.parents, torch.from_numpy(Q3[draft.depths]))

    joint = enumerated_rejection(monkeypatch, P3, propose)
    assert joint.sum() == pytest.approx(1) and np.abs(joint - np.outer(P3[0], P3[1])).max() > 1e-3


# Drawn.

V = 16
AT = 10
HISTORY = [3, 1, 4, 1, 5, 9, 3, 3]
PROMPT = 3
PROCESSORS = {
    "plain": Sampling(temperature=1.0),
    "temperature": Sampling(temperature=0.6),
    "top-k": Sampling(temperature=1.0, top_k=6),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "min-p": Sampling(temperature=1.0, min_p=0.15),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.6),
    "presence, frequency": Sampling(temperature=1.0, presence_penalty=0.6, frequency_penalty=0.4),
}
DRAFTS = ("good", "bad", "adversarial")
SHAPES = ("chain", "static", "dynamic", "lookup")
RULES: tuple[Rule, ...] = ("coupled", "rejection")


def logits(kind: str = "target") -> np.ndarray:
    """(4, V) at four depths, of the target or of a draft; the rows differ, so that a wrong row is noticed."""
    random = np.random.default_rng(5)
    target = random.standard_normal((4, V)) * 1.3
    other = random.standard_normal((4, V)) * 1.3
    return {"target": target, "good": target + 0.4 * other, "bad": other, "adversarial": -target}[kind]


def rows(kind: str, sampling: Sampling) -> np.ndarray:
    """(4, V) float64 after the processors."""
    found = probabilities(torch.tensor(logits(kind)), sampling, HISTORY, [[]] * 4, PROMPT)
    return found.numpy()


def proposal(shape: str, rule: Rule, q: np.ndarray, seed: int) -> Draft:
    """A draft of up to five tokens at AT, as the drafters make it."""
    if shape == "lookup":  # tokens that nobody drew: probable, and for some processors impossible
        return Draft([int(q[0].argmax()), (seed // 7) % V], [-1, 0])
    growing: Growing
    if shape == "dynamic":
        growing = (DrawnTree if rule == "rejection" else RankedTree)(DYNAMIC, 5, 3)
    else:
        growing = ShapedTree(TreeShape((1, 1)) if shape == "chain" else STATIC, 5, 3)

    def candidates(tree: Tree, node: int) -> Candidates:
        row = q[tree.depth(node)]
        if rule == "coupled":
            return ranked(row / exponential(seed, AT + tree.depth(node), V), 3)
        return drawn(row, -np.log(uniforms(seed, AT, Stream.DRAFT, V, lane=node + 1)), 3)

    return grown(growing, candidates)


def counted(
    rule: Rule, p: np.ndarray, q: np.ndarray, shape: str, draws: int, judge: Callable[..., Acceptance] | None = None
) -> np.ndarray:
    """(V, V) counts of the first two tokens of `draws` rounds, the second by the target where one has only one."""
    decide = judge if judge is not None else {"coupled": coupled, "rejection": rejection}[rule]
    counts = np.zeros((V, V))
    for seed in range(draws):
        draft = proposal(shape, rule, q, seed)
        target = torch.from_numpy(p[[0, *(d + 1 for d in draft.depths)]])
        verdict = decide(target, draft, AT, seed)
        out = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
        if len(out) == 1 and rule == "coupled":
            out.append(race(p[1], exponential(seed, AT + 1, V)))
        elif len(out) == 1:
            out.append(pick(p[1], uniforms(seed, AT + 1, Stream.RESIDUAL, 1)[0]))
        counts[out[0], out[1]] += 1
    return counts


def p_value(chi_squared: ChiSquared, counts: np.ndarray, p: np.ndarray) -> float:
    """The least of three p-values (joint, first, second token), by Bonferroni times three."""
    pairs = chi_squared(counts, np.outer(p[0], p[1]))
    return 3 * min(pairs, chi_squared(counts.sum(1), p[0]), chi_squared(counts.sum(0), p[1]))


# All tests of this file together: a family of fewer than 1000, each held to this.
LEAST = 1e-3 / 1000


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_rounds_follow_the_target(rule: Rule, shape: str, chi_squared: ChiSquared) -> None:
    """Every draft and every processor occurs, each processor with one of the drafts."""
    for i, sampling in enumerate(PROCESSORS.values()):
        p, q = rows("target", sampling), rows(DRAFTS[(i + 2) % 3], sampling)
        assert p_value(chi_squared, counted(rule, p, q, shape, 400), p) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_rounds_with_every_processor(
    rule: Rule, shape: str, processor: str, kind: str, chi_squared: ChiSquared
) -> None:
    p, q = rows("target", PROCESSORS[processor]), rows(kind, PROCESSORS[processor])
    assert p_value(chi_squared, counted(rule, p, q, shape, 4000), p) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("rule", RULES)
def test_200_000_rounds(rule: Rule, shape: str, chi_squared: ChiSquared) -> None:
    p, q = rows("target", PROCESSORS["plain"]), rows("adversarial", PROCESSORS["plain"])
    assert p_value(chi_squared, counted(rule, p, q, shape, 200_000), p) > LEAST


def test_200_000_draws_of_the_rule(monkeypatch: pytest.MonkeyPatch, chi_squared: ChiSquared) -> None:
    """The rejection rule itself, one drafted token, with numbers drawn all at once."""
    p, q = rows("target", PROCESSORS["plain"])[:2], rows("bad", PROCESSORS["plain"])[:1]
    numbers = np.random.default_rng(0).random((200_000, 3))
    tokens = np.searchsorted(np.cumsum(q[0]), numbers[:, 0] * q[0].sum(), side="right")
    drafts = [Draft([token], [-1], torch.from_numpy(q)) for token in range(V)]
    target = torch.from_numpy(p)

    now = numbers[0]
    monkeypatch.setattr(verify, "uniforms", lambda seed, at, stream, count: now[stream : stream + count])
    monkeypatch.setattr(verify, "pick", lambda row, uniform: int(np.cumsum(row).searchsorted(uniform * row.sum())))

    def measure(draws: int) -> np.ndarray:
        nonlocal now
        first = np.zeros(V)
        for i, token in enumerate(tokens[:draws].tolist()):
            now = numbers[i]
            verdict = rejection(target, drafts[token], AT, 0)
            first[token if verdict.path else verdict.next_token] += 1
        return first

    assert chi_squared(measure(200_000), p[0]) > LEAST
    monkeypatch.setattr(verify._Node, "lose", lambda node, proposal: None)
    assert chi_squared(measure(20_000), p[0]) < 1e-9


def broken_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with monkeypatch.context() as patch:
        patch.setattr(verify._Node, "lose", lambda node, proposal: None)
        yield "p / q without the residual"
    with monkeypatch.context() as patch:
        patch.setattr(verify, "_proposal", lambda draft, index, size: np.full(size, 1 / size))
        yield "q taken for uniform"


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_a_broken_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, shape: str, chi_squared: ChiSquared) -> None:
    p, q = rows("target", PROCESSORS["plain"]), rows("bad", PROCESSORS["plain"])
    for name in broken_rules(monkeypatch):
        assert p_value(chi_squared, counted("rejection", p, q, shape, 1500), p) < 1e-9, name


# End to end: texts of several rounds, from a target whose next token depends on the last one.


def table(kind: str) -> np.ndarray:
    """(V, V) logits after each last token."""
    random = np.random.default_rng(8)
    target = random.standard_normal((V, V)) * 1.3
    other = random.standard_normal((V, V)) * 1.3
    return {"target": target, "good": target + 0.4 * other, "bad": other, "adversarial": -target}[kind]


def expected_text(sampling: Sampling, prompt: list[int]) -> np.ndarray:
    """(V, V, V) the probability of each text of three tokens."""
    after = torch.tensor(table("target"))

    def row(text: list[int]) -> np.ndarray:
        return probabilities(after[text[-1]], sampling, text, [[]], len(prompt)).numpy()

    out = np.zeros((V, V, V))
    first = row(prompt)
    for a in range(V):
        second = row([*prompt, a]) * first[a]
        for b in range(V):
            if second[b] > 0:
                out[a, b] = row([*prompt, a, b]) * second[b]
    return out


def heads() -> Heads:
    """Medusa heads that always say the same, most of it improbable."""
    rows = torch.tensor(logits("bad")[:2], dtype=torch.float32)
    about = Description(2, 1, 4, V, False, ((0,), (1,), (0, 0), (2,), (0, 1)), "")
    made = tuple(Head((), lambda x, row=row: row.expand(len(x), -1)) for row in rows)  # type: ignore[misc]
    return Heads(about, lambda x: torch.zeros(len(x), 8), made)


def drafter_of(name: str, draft: Any, rule: Rule) -> Any:
    return {
        "chain": lambda: ModelDrafter(draft, rule),
        "static": lambda: TreeDrafter(draft, STATIC, rule),
        "dynamic": lambda: TreeDrafter(draft, DYNAMIC, rule),
        "lookup": LookupDrafter,
        "suffix": lambda: SuffixDrafter([[i % V for i in range(40)]], min_match=1),
        "medusa": lambda: MedusaDrafter(heads(), rule),
    }[name]()


def written(target: Any, drafter: Any, rule: Rule, sampling: Sampling, count: int) -> np.ndarray:
    """(V, V, V) counts of the texts of `count` seeds, in batches."""
    counts = np.zeros((V, V, V))
    speculator = Speculator(target, drafter, draft_length=5, verify=rule)
    for first in range(0, count, 500):
        seeds = range(first, min(first + 500, count))
        samplings = [replace(sampling, seed=seed) for seed in seeds]
        # Seven tokens, so that the third is in the middle of a draft as often as not.
        for result in speculator.generate([PROMPT_TOKENS] * len(seeds), 7, samplings, stop=()):
            counts[tuple(result.tokens[:3])] += 1
    return counts


PROMPT_TOKENS = [2, 7, 2, 7, 2]


def text_p_value(chi_squared: ChiSquared, counts: np.ndarray, expected: np.ndarray) -> float:
    """The least of the whole text's, both pairs' and each token's p-value, times their number."""
    kept = [(0, 1, 2), (0, 1), (1, 2), (0,), (1,), (2,)]
    gone = [tuple(axis for axis in range(3) if axis not in axes) for axes in kept]
    return len(kept) * min(chi_squared(counts.sum(axes), expected.sum(axes)) for axes in gone)


@pytest.fixture
def markov(tokenizer: Any) -> Callable[[str], Any]:
    from tests.runtime.conftest import FakeModel, HashDecoder

    def make(kind: str) -> Any:
        after = table(kind)
        return FakeModel(HashDecoder(lambda context: after[context[-1]], vocab_size=V), tokenizer)

    return make


@pytest.mark.parametrize("name", ["chain", "static", "dynamic", "lookup", "suffix", "medusa"])
@pytest.mark.parametrize("rule", RULES)
def test_texts_follow_the_target(rule: Rule, name: str, markov: Any, chi_squared: ChiSquared) -> None:
    sampling = PROCESSORS["repetition" if name == "static" else "top-p" if name == "dynamic" else "plain"]
    expected = expected_text(sampling, PROMPT_TOKENS)
    counts = written(markov("target"), drafter_of(name, markov("adversarial"), rule), rule, sampling, 300)
    assert text_p_value(chi_squared, counts, expected) > LEAST


def test_texts_of_a_broken_rule_are_noticed(
    monkeypatch: pytest.MonkeyPatch, markov: Any, chi_squared: ChiSquared
) -> None:
    expected = expected_text(PROCESSORS["plain"], PROMPT_TOKENS)
    monkeypatch.setattr(verify._Node, "lose", lambda node, proposal: None)
    drafter = drafter_of("dynamic", markov("bad"), "rejection")
    counts = written(markov("target"), drafter, "rejection", PROCESSORS["plain"], 1000)
    assert text_p_value(chi_squared, counts, expected) < 1e-9


WITH_MODEL = [(name, kind) for name in ("chain", "static", "dynamic") for kind in DRAFTS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [*WITH_MODEL, ("lookup", "none"), ("suffix", "none"), ("medusa", "none")])
@pytest.mark.parametrize("rule", RULES)
def test_10_000_texts(rule: Rule, name: str, kind: str, markov: Any, chi_squared: ChiSquared) -> None:
    """Every processor occurs with both rules, and with chains and trees."""
    number = WITH_MODEL.index((name, kind)) if kind != "none" else 1
    sampling = list(PROCESSORS.values())[number % len(PROCESSORS)]
    expected = expected_text(sampling, PROMPT_TOKENS)
    drafter = drafter_of(name, None if kind == "none" else markov(kind), rule)
    counts = written(markov("target"), drafter, rule, sampling, 10_000)
    assert text_p_value(chi_squared, counts, expected) > LEAST
