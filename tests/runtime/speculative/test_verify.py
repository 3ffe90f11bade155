"""Both sampling rules against the target's distribution, whatever the draft; and that the harness can tell."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.sampling.noise import Stream, exponential, pick, race, uniforms
from runtime.sampling.params import Sampling
from runtime.speculative import verify
from runtime.speculative.draft import Draft
from runtime.speculative.verify import Acceptance, coupled, greedy, rejection
from tests.probabilities import probabilities

ChiSquared = Callable[[np.ndarray, np.ndarray], float]
V = 16
HISTORY = [3, 1, 4, 1, 5, 9]
PROCESSORS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.0, top_k=6),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.15),
    Sampling(temperature=1.0, repetition_penalty=1.6),
]
RULES = {"coupled": coupled, "rejection": rejection}


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * 1.3


def drafts(kind: str, rule: str, logits: Tensor, target: Tensor, sampling: Sampling, draws: int) -> Iterator[Draft]:
    """Chains of len(logits) − 1 tokens at position 10, one per seed: drawn from q, or from nothing random."""
    count = len(logits) - 1
    parents = list(range(-1, count - 1))
    if kind in ("likely", "unlikely"):  # unlikely: often a token that the processors have made impossible
        tokens = (target.argmin(-1) if kind == "unlikely" else target.argmax(-1))[:count].tolist()
        yield from (Draft(tokens, parents) for _ in range(draws))
        return
    own = {
        "same": logits,
        "good": logits + 0.4 * rows(count + 1, 77),
        "reversed": -logits,  # likely where the target is not: the classic way to see a biased residual
        "sharp": logits * 40,
    }[kind]
    q = probabilities(own, sampling, HISTORY, [[]] * (count + 1))[:count]
    arrays = list(q.numpy())
    for seed in range(draws):
        if rule == "coupled":
            tokens = [race(row, exponential(seed, 10 + i, V)) for i, row in enumerate(arrays)]
            yield Draft(tokens, parents)
        else:
            tokens = [pick(row, uniforms(seed, 10 + i, Stream.DRAFT, 1)[0]) for i, row in enumerate(arrays)]
            yield Draft(tokens, parents, q)


def decide(rule: Callable[..., Acceptance], target: Tensor, proposals: Iterator[Draft]) -> np.ndarray:
    """Counts (V + 1, V + 1) of the first two tokens of each round; the second is V where the round had only one."""
    counts = np.zeros((V + 1, V + 1))
    for seed, draft in enumerate(proposals):
        verdict = rule(target, draft, 10, seed)
        tokens = [*(draft.tokens[i] for i in verdict.path), verdict.next_token, V]
        counts[tokens[0], tokens[1]] += 1
    return counts


def p_value(chi_squared: ChiSquared, counts: np.ndarray, target: Tensor) -> float:
    """The worse of: the first token against row 0, and the second against row 1 whatever the first was."""
    first = chi_squared(counts.sum(1)[:V], target[0].numpy())
    second = counts[:, :V].sum(0)
    return min(first, chi_squared(second, target[1].numpy()) if second.sum() > 200 else 1.0)


@pytest.mark.parametrize("sampling", PROCESSORS, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_tokens_follow_the_target(rule: str, sampling: Sampling, chi_squared: ChiSquared) -> None:
    # The two rows are each other's reverse, so that a rule that looks at the wrong row is noticed.
    logits = rows(1, 5)
    logits = torch.cat([logits, logits.flip(-1), logits])
    target = probabilities(logits, sampling, HISTORY, [[]] * 3)
    for kind in ("good", "reversed", "unlikely"):
        proposals = drafts(kind, rule, logits, target, sampling, 2500)
        assert p_value(chi_squared, decide(RULES[rule], target, proposals), target) > 1e-3, kind


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["same", "likely", "sharp"])
def test_other_drafts(rule: str, kind: str, chi_squared: ChiSquared) -> None:
    logits, sampling = rows(3, 6), Sampling(temperature=1.0)
    target = probabilities(logits, sampling)
    counts = decide(RULES[rule], target, drafts(kind, rule, logits, target, sampling, 3000))
    assert p_value(chi_squared, counts, target) > 1e-3
    if kind == "same":  # a perfect draft is always accepted
        assert counts[:, V].sum() == 0


def upside_down(target: Tensor, draft: Draft, position: int, seed: int) -> Acceptance:
    """A rule that was shipped once: the acceptance ratio inverted."""
    assert draft.probs is not None
    p, q, token = target[0].numpy(), draft.probs[0].numpy(), draft.tokens[0]
    if uniforms(seed, position, Stream.ACCEPT, 1)[0] < q[token] / p[token]:
        return Acceptance([0], pick(target[1].numpy(), uniforms(seed, position + 1, Stream.RESIDUAL, 1)[0]))
    return Acceptance([], pick(np.maximum(p - q, 0), uniforms(seed, position, Stream.RESIDUAL, 1)[0]))


def broken_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[..., Acceptance]]]:
    yield "ratio upside down", upside_down
    with monkeypatch.context() as patch:
        patch.setattr(verify._Node, "lose", lambda node, q: None)
        yield "no residual", rejection
    with monkeypatch.context() as patch:
        patch.setattr(verify, "uniforms", lambda s, at, stream, n: uniforms(s, at, Stream.DRAFT, n))
        yield "noise shared with the draft", rejection
    with monkeypatch.context() as patch:
        patch.setattr(verify, "_proposal", lambda draft, index, size: np.full(size, 1 / size))
        yield "q taken for uniform", rejection


def test_the_harness_rejects_broken_rules(monkeypatch: pytest.MonkeyPatch, chi_squared: ChiSquared) -> None:
    logits, sampling = rows(3, 5), Sampling(temperature=1.0)
    target = probabilities(logits, sampling)

    def measure(rule: Callable[..., Acceptance]) -> float:
        proposals = drafts("reversed", "rejection", logits, target, sampling, 2500)
        return p_value(chi_squared, decide(rule, target, proposals), target)

    assert measure(rejection) > 1e-3
    for name, rule in broken_rules(monkeypatch):
        assert measure(rule) < 1e-9, name


def test_coupled_tokens_do_not_depend_on_the_draft() -> None:
    logits, sampling = rows(3, 8), Sampling(temperature=1.0)
    target = probabilities(logits, sampling)
    accepted = 0
    for seed in range(300):
        alone = [race(target[i].numpy(), exponential(seed, 10 + i, V)) for i in range(3)]
        for kind in ("good", "reversed", "likely"):
            [draft] = drafts(kind, "rejection", logits, target, sampling, 1)
            verdict = coupled(target, draft, 10, seed)
            tokens = [*(draft.tokens[i] for i in verdict.path), verdict.next_token]
            assert tokens == alone[: len(tokens)]
            accepted += len(verdict.path)
    assert accepted > 50


# A tree: two candidates for the first token, two below the first of them, one below the second.
PARENTS = [-1, -1, 0, 0, 1]


def test_paths_and_children() -> None:
    draft = Draft([5, 6, 7, 8, 9], PARENTS)
    assert draft.paths == [[], [5], [6], [5, 7], [5, 8], [6, 9]]
    assert draft.children == {-1: [0, 1], 0: [2, 3], 1: [4]}
    assert Draft().paths == [[]]


def test_greedy_walks_the_target_s_choices() -> None:
    draft = Draft([5, 6, 7, 8, 9], PARENTS)
    assert greedy([6, 0, 9, 0, 0, 11], draft) == Acceptance([1, 4], 11)
    assert greedy([5, 8, 9, 0, 3, 11], draft) == Acceptance([0, 3], 3)
    assert greedy([4, 8, 9, 0, 3, 11], draft) == Acceptance([], 4)
    assert greedy([2], Draft()) == Acceptance([], 2)
    assert greedy([2, 3, 4], Draft([2, 3], [-1, 0])) == Acceptance([0, 1], 4)
    assert greedy([2, 1, 4], Draft([2, 3], [-1, 0])) == Acceptance([0], 1)


@pytest.mark.parametrize("replace", [True, False])
def test_rejection_in_a_tree(replace: bool, chi_squared: ChiSquared) -> None:
    """Siblings with and without replacement, each with the distribution it was really drawn from."""
    logits, sampling = rows(6, 9), Sampling(temperature=1.0)
    target = probabilities(logits, sampling)
    q = probabilities(-logits, sampling).numpy()
    counts, second_sibling = np.zeros((V + 1, V + 1)), 0
    for seed in range(4000):
        random = np.random.default_rng(seed + 10**6)
        tokens: list[int] = []
        probs: list[np.ndarray] = []
        for parent, siblings in ((-1, []), (-1, [0]), (0, []), (0, [2]), (1, [])):
            row = q[parent + 1].copy()
            if not replace:
                row[[tokens[i] for i in siblings]] = 0
            row /= row.sum()
            tokens.append(int(random.choice(V, p=row)))
            probs.append(row)
        draft = Draft(tokens, PARENTS, torch.tensor(np.array(probs)))
        # Which row follows depends on the path: give both depth-1 nodes the same distribution.
        verdict = rejection(target[[0, 1, 1, 2, 2, 2]], draft, 10, seed)
        out = [*(tokens[i] for i in verdict.path), verdict.next_token, V]
        counts[out[0], out[1]] += 1
        second_sibling += verdict.path[:1] == [1]
    assert p_value(chi_squared, counts, target) > 1e-3
    assert second_sibling > 100


def test_deterministic_siblings(chi_squared: ChiSquared) -> None:
    target = probabilities(rows(6, 10), Sampling(temperature=1.0))[[0, 1, 1, 2, 2, 2]]
    draft = Draft([0, 1, 2, 3, 4], PARENTS)
    counts = decide(rejection, target, (draft for _ in range(4000)))
    assert p_value(chi_squared, counts, target) > 1e-3


def test_what_is_left_of_equal_distributions_is_guarded() -> None:
    p = np.array([0.25, 0.75, 0.0])
    text = verify._Node(-1, 1.0, p, [])
    text.lose(p)
    assert np.array_equal(text.left, p) and text.mass == 1
    text.lose(np.array([0.75, 0.25, 0.0]))
    assert np.allclose(text.left, [0, 1, 0]) and text.mass == 1
    token = verify._Node(0, 0.5, p, [])
    token.lose(p)
    assert token.mass == 0


def test_a_token_that_its_own_distribution_excludes() -> None:
    target = probabilities(rows(2), Sampling(temperature=1.0))
    q = torch.zeros(1, V, dtype=torch.float64)
    q[0, 3] = 1
    rejection(target, Draft([3], [-1], q), 10, 0)
    with pytest.raises(ValueError, match="draft token 4 at position 10 has probability 0"):
        rejection(target, Draft([4], [-1], q), 10, 0)


def chance(count: int, random: np.random.Generator) -> np.ndarray:
    """(count, V4) rows of any shape: even, and with one token that has nearly all."""
    return random.dirichlet(np.full(4, random.choice([0.2, 1.0, 5.0])), count)


def accepted_on_average(p: np.ndarray, q: np.ndarray) -> tuple[float, float]:
    """Token by token, and by blocks: the accepted tokens of chains drawn from q (n, V), by going through all of them.

    Of a chain of these rows n tokens are drafted; by definition, not by the code that is tested.
    """
    by_token = by_block = 0.0
    for tokens in product(range(p.shape[1]), repeat=len(q)):
        drawn, one, block = 1.0, 1.0, 1.0
        for row, token in enumerate(tokens):
            drawn *= q[row, token]
        if drawn == 0:
            continue
        for row, token in enumerate(tokens):
            ratio = p[row, token] / q[row, token]
            one, block = one * min(1.0, ratio), min(1.0, block * ratio)
            by_token, by_block = by_token + drawn * one, by_block + drawn * block
    return by_token, by_block


def test_blocks_accept_no_less_than_token_by_token_and_what_the_paper_says() -> None:
    random, more = np.random.default_rng(3), 0
    pairs = [(chance(4, random), chance(3, random)) for _ in range(1000)]
    for p, q in pairs:
        by_token, by_block = accepted_on_average(p[:3], q)
        assert by_block >= by_token - 1e-12
        more += by_block > 1.01 * by_token
    assert more > 500
    for p, q in pairs[:6]:
        counts, rounds = [], 3000
        for seed in range(rounds):
            tokens = [pick(row, uniforms(seed, 10, Stream.DRAFT, 1, lane=i + 1)[0]) for i, row in enumerate(q)]
            draft = Draft.chain(tokens, torch.tensor(q))
            counts.append(len(rejection(torch.tensor(p), draft, 10, seed).path))
        error = np.std(counts) / rounds**0.5 + 0.002
        assert abs(np.mean(counts) - accepted_on_average(p[:3], q)[1]) < 4.5 * error


@pytest.mark.parametrize("kept", [False, True])
def test_texts_of_several_rounds(kept: bool, chi_squared: ChiSquared) -> None:
    """Three tokens of a Markov chain; drafts that are drawn with the noise of the round before show."""
    random = np.random.default_rng(3)
    p, q = (random.dirichlet(np.full(3, 2.0), 4) for _ in range(2))  # after nothing, and after each token
    counts = np.zeros((3, 3, 3))
    for seed in range(3000):
        text: list[int] = []
        while len(text) < 3:
            tokens, probs, last = [], [], text[-1] + 1 if text else 0
            for i in range(3):
                where = (10 + len(text) + i, 0) if kept else (10 + len(text), i + 1)
                probs.append(q[last])
                tokens.append(pick(q[last], uniforms(seed, where[0], Stream.DRAFT, 1, lane=where[1])[0]))
                last = tokens[-1] + 1
            target = p[[text[-1] + 1 if text else 0, *(token + 1 for token in tokens)]]
            draft = Draft.chain(tokens, torch.tensor(np.array(probs)))
            found = rejection(torch.tensor(target), draft, 10 + len(text), seed)
            text += [*(tokens[i] for i in found.path), found.next_token]
        counts[tuple(text[:3])] += 1
    want = p[0][:, None, None] * p[1:][:, :, None] * p[1:][None]
    verdict = chi_squared(counts.reshape(-1), want.reshape(-1))
    assert verdict < 1e-9 if kept else verdict > 1e-3
