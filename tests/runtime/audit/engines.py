"""A sound speculative sampler of the known model, over many texts at once, for tests to plant bugs in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.audit.asks import Ask
from runtime.audit.known import KnownModel
from runtime.audit.sampled import Known

GAMMA = 3


@dataclass
class Sampler:
    """Leviathan's rule (2211.17192) over a batch, in float64; methods are what planted bugs replace.

    Noise is by text and position of a round, drawn from a generator of the batch: texts of any seeds are independent.
    """

    known: Known
    seed: int = 0

    def __call__(self, asks: Sequence[Ask]) -> list[Mapping[str, Any]]:
        """The protocol of callables; asks of one prompt and one sampling share forwards."""
        self.seed += 1
        groups: dict[Any, list[int]] = {}
        for number, ask in enumerate(asks):
            alike = (ask.prompt, ask.new_tokens, ask.temperature, ask.top_k, ask.top_p, ask.drafts)
            groups.setdefault(alike, []).append(number)
        found: list[Mapping[str, Any]] = [{} for _ in asks]
        for (prompt, count, *ways, drafts), numbers in groups.items():
            self.ways, self.drafts = ways, drafts
            seeds = np.array([asks[number].seed for number in numbers])
            for number, text in zip(numbers, self.texts(prompt, count, seeds), strict=True):
                found[number] = {"tokens": text.tolist()}
                if asks[number].logprobs:
                    found[number] |= {"logprobs": self.logprobs(prompt, text)}
        return found

    def texts(self, prompt: tuple[int, ...], count: int, seeds: np.ndarray) -> np.ndarray:
        """(B, count) token ids."""
        batch, gamma = len(seeds), GAMMA if self.drafts else 0
        self.rng = np.random.default_rng([self.seed, *seeds[:1]])
        self.seeds = seeds
        room = len(prompt) + count + 2 * GAMMA + 2
        self.text = np.zeros((batch, room), dtype=np.int64)
        self.text[:, : len(prompt)] = prompt
        self.length = np.full(batch, len(prompt))
        caches = [model.cache(batch, room) for model in (self.known.target, self.known.draft)]
        models = (self.known.target, self.known.draft)
        start = np.zeros(batch, dtype=np.int64)
        if len(prompt) > 1:
            for model, cache in zip(models, caches, strict=True):
                model.extend(cache, self.text[:, : len(prompt) - 1], start)
        rows = np.arange(batch)
        while (self.length < len(prompt) + count).any():
            # Finished texts go on where they end: their rows cost little, and are cut off below.
            self.length = np.minimum(self.length, len(prompt) + count)
            drafted = np.zeros((batch, gamma), dtype=np.int64)
            proposals = []
            token, at = self.text[rows, self.length - 1], self.length - 1
            for step in range(gamma):
                q = self.probs(models[1], models[1].extend(caches[1], token[:, None], at)[:, 0])
                proposals.append(q)
                drafted[:, step] = self.draw(q, "draft", step)
                token, at = self.ids(drafted[:, step]), at + 1
            if gamma:
                # The draft reads its last token, too: the next round may begin behind it.
                models[1].extend(caches[1], token[:, None], at)
            inputs = np.concatenate([self.text[rows, self.length - 1][:, None], self.ids(drafted)], axis=1)
            target = self.probs(models[0], models[0].extend(caches[0], inputs, self.length - 1))
            nothing = np.zeros((batch, 0, target.shape[-1]))
            self.verify(drafted, np.stack(proposals, axis=1) if gamma else nothing, target)
        return self.text[:, len(prompt) : len(prompt) + count]

    def ids(self, numbers: np.ndarray) -> np.ndarray:
        model = self.known.target
        return np.array([*model.letters, model.other])[numbers]

    def probs(self, model: KnownModel, logits: np.ndarray) -> np.ndarray:
        if self.ways[0] == 0:
            out = np.zeros_like(logits)
            np.put_along_axis(out, logits[..., :-1].argmax(-1)[..., None], 1.0, -1)
            return out
        return model.probabilities(logits, *self.ways)[0]

    def uniform(self, what: str, step: Any) -> np.ndarray:
        """(B,) uniforms for a use of noise: "draft", "accept" or "residual" at a step of the round, or (B,) steps."""
        return self.rng.random(len(self.length))

    def draw(self, p: np.ndarray, what: str, step: Any) -> np.ndarray:
        """(B,) numbers of letters drawn from (B, C), by inversion."""
        upto = p.cumsum(axis=-1)
        return np.minimum((self.uniform(what, step)[:, None] * upto[:, -1:] >= upto).sum(axis=-1), p.shape[-1] - 1)

    def residual(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        left = np.maximum(p - q, 0.0)
        total = left.sum(axis=-1, keepdims=True)
        return np.where(total > 0, left / np.maximum(total, 1e-300), p)

    def accepts(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray, step: int) -> np.ndarray:
        """(B,): whether the token at a step is accepted."""
        rows = np.arange(len(drafted))
        token = drafted[:, step]
        return self.uniform("accept", step) < target[rows, step, token] / q[rows, step, token]

    def verify(self, drafted: np.ndarray, q: np.ndarray, target: np.ndarray) -> None:
        """Adds accepted tokens and one of the target's to each text."""
        batch, gamma = drafted.shape
        rows, open_ = np.arange(batch), np.ones(batch, dtype=bool)
        accepted = np.zeros(batch, dtype=np.int64)
        for step in range(gamma):
            open_ &= self.accepts(drafted, q, target, step)
            accepted += open_
        padded = np.concatenate([q, np.zeros_like(target[:, :1])], axis=1)
        last = self.residual(target[rows, accepted], padded[rows, accepted])
        added = self.draw(last, "residual", accepted)
        for step in range(gamma):
            here = accepted > step
            self.text[rows[here], self.length[here] + step] = self.ids(drafted[here, step])
        self.text[rows, self.length + accepted] = self.ids(added)
        self.length = self.length + accepted + 1

    def logprobs(self, prompt: tuple[int, ...], text: np.ndarray) -> list[float]:
        model = self.known.target
        probs, _ = model.probabilities(model.next_logits(prompt, text[None]), 1.0)
        return np.log(probs[0, np.arange(len(text)), model.numbers(text.tolist())]).tolist()
