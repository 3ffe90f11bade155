"""Planted bugs, by name: what engines have got wrong, each as small a change of the sound sampler as it takes."""

from typing import Any

import numpy as np

from runtime.audit.known import KnownModel
from tests.runtime.audit.engines import Sampler


class SharedWithAcceptance(Sampler):
    """The uniform that drew the draft's token also decides whether it is accepted."""

    def uniform(self, what: str, step: Any) -> np.ndarray:
        if what == "draft":
            self.kept = super().uniform(what, step)
            return self.kept
        return self.kept if what == "accept" else super().uniform(what, step)


class SharedWithResidual(Sampler):
    """The uniform that drew a rejected token draws the one in its place, too."""

    def uniform(self, what: str, step: Any) -> np.ndarray:
        own = super().uniform(what, step)
        if what == "draft":
            self.kept = {} if step == 0 else self.kept
            self.kept[step] = own
        if what != "residual" or not self.drafts:
            return own
        rows = np.arange(len(own))
        return np.stack([*self.kept.values(), own])[step, rows]


class SharedByRequests(Sampler):
    """All texts of a batch have the same noise, whatever their seeds."""

    def uniform(self, what: str, step: Any) -> np.ndarray:
        return np.full(len(self.length), self.rng.random())


class SharedByPairs(Sampler):
    """The seed loses its last bit."""

    def uniform(self, what: str, step: Any) -> np.ndarray:
        return super().uniform(what, step)[self.seeds // 2 % len(self.length)]


class SeedPlusPosition(Sampler):
    """Noise is keyed by seed + position: a text's next token has the noise of the next seed's token here."""

    def uniform(self, what: str, step: Any) -> np.ndarray:
        kind = ("draft", "accept", "residual").index(what)
        keys = self.seeds + self.length + step * (what != "residual")
        return np.array([np.random.default_rng([self.seed, kind, int(key)]).random() for key in keys])


class SameNoiseEveryRound(Sampler):
    """A generator that is seeded again in each round."""

    def uniform(self, what: str, step: Any) -> np.ndarray:
        kind = ("draft", "accept", "residual").index(what)
        return np.array([np.random.default_rng([int(seed), kind, step]).random() for seed in self.seeds])


class ResidualOfTarget(Sampler):
    """After a rejection the target itself is sampled."""

    def residual(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return p


class ResidualAbsolute(Sampler):
    """After a rejection |p − q| is sampled."""

    def residual(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        left = np.abs(p - q)
        total = left.sum(axis=-1, keepdims=True)
        return np.where(total > 0, left / np.maximum(total, 1e-300), p)


class ResidualUnscaled(Sampler):
    """After a rejection the most probable token of the residual is taken."""

    def residual(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        left = super().residual(p, q)
        return np.where(q.sum(axis=-1, keepdims=True) > 0, left == left.max(axis=-1, keepdims=True), left)


class AcceptsByNextRow(Sampler):
    """Off by one: a token is judged by the row that follows it."""

    def accepts(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray, step: int) -> np.ndarray:
        rows, token = np.arange(len(drafted)), drafted[:, step]
        return self.uniform("accept", step) < target[rows, step + 1, token] / q[rows, step, token]


class AcceptsOneMore(Sampler):
    """Off by one: the last token of a draft is never judged."""

    def accepts(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray, step: int) -> np.ndarray:
        judged = super().accepts(drafted, q, target, step)
        return judged | (step == drafted.shape[1] - 1)


class BonusOfRowBefore(Sampler):
    """Off by one: after a draft that was accepted whole, the token comes from the row before."""

    def verify(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray) -> None:
        if drafted.shape[1]:
            target = np.concatenate([target[:, :-1], target[:, -2:-1]], axis=1)
        super().verify(drafted, q, target)


class LenientAcceptance(Sampler):
    """Accepts a fifth more than it may."""

    def accepts(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray, step: int) -> np.ndarray:
        rows, token = np.arange(len(drafted)), drafted[:, step]
        return self.uniform("accept", step) < 1.2 * target[rows, step, token] / q[rows, step, token]


class AcceptsLikely(Sampler):
    """Accepts whatever the target gives some probability."""

    def accepts(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray, step: int) -> np.ndarray:
        rows, token = np.arange(len(drafted)), drafted[:, step]
        return target[rows, step, token] > 0.1


class DraftWithoutTruncation(Sampler):
    """The draft's q in the rule is at temperature 1 and whole, and its tokens are drawn as asked."""

    def verify(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray) -> None:
        other = np.sqrt(q)
        super().verify(drafted, other / np.maximum(other.sum(axis=-1, keepdims=True), 1e-300), target)


class TargetAtOtherTemperature(Sampler):
    """With drafts the target is a tenth too hot."""

    def probs(self, model: KnownModel, logits: np.ndarray) -> np.ndarray:
        hot = 1.1 if self.drafts and model is self.known.target and self.ways[0] else 1.0
        return super().probs(model, logits / hot)


BUGS: dict[str, type[Sampler]] = {kind.__name__: kind for kind in Sampler.__subclasses__()}
