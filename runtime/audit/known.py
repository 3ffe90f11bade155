"""A tiny Llama whose next-token distributions are known: its forward in float64, and what sampling makes of them.

Only twenty letters are ever likely, each of them one token and one character, so that a text gives its tokens back,
whatever the engine returns. All other tokens have the same small logit. The attention is a real one, so that an engine
whose cache is wrong after a rejected draft gives other distributions, too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.files import read_json, regular

Array = NDArray[np.float64]
Tokens = NDArray[np.int64]

LETTERS = "abcdefghijklmnopqrst"
DESCRIPTION = "audit.json"
WEIGHTS = "model.safetensors"
# Where engines round (bfloat16 included), they may cut a distribution elsewhere than float64 does: relative distance.
_NEAR = 2e-3


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. One channel of the stream is the same everywhere: it keeps unlikely tokens unlikely."""

    hidden: int = 32
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    head_size: int = 16
    inner: int = 64
    theta: float = 10_000.0
    epsilon: float = 1e-5
    positions: int = 1024


SHAPE = Shape()


@dataclass(frozen=True)
class Cache:
    """Keys, rotated, and values: (layers, B, positions, KV heads, head size) each."""

    keys: Array
    values: Array


@dataclass(frozen=True)
class KnownModel:
    """Weights by transformers' names, and the ids of the letters; all other tokens have the logits of token `other`."""

    weights: dict[str, Array]
    letters: tuple[int, ...]
    other: int

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.weights["lm_head.weight"])

    def cache(self, rows: int, positions: int) -> "Cache":
        """An empty cache of `rows` texts of at most so many tokens."""
        shape = (SHAPE.layers, rows, positions, SHAPE.kv_heads, SHAPE.head_size)
        return Cache(np.zeros(shape), np.zeros(shape))

    def extend(self, cache: "Cache", tokens: Tokens, starts: Tokens) -> Array:
        """(B, T, letters + 1) logits in float64 after each of (B, T) token ids; the last is that of each other token.

        starts  (B,): the position of each text's first new token; what the cache held from there on is written over.
        """
        w, shape = self.weights, SHAPE
        batch = np.arange(len(tokens))[:, None]
        x, positions = w["model.embed_tokens.weight"][tokens], starts[:, None] + np.arange(tokens.shape[1])
        angles = positions[..., None] * shape.theta ** (-np.arange(0, shape.head_size, 2) / shape.head_size)
        cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]
        length = int(positions.max()) + 1
        hidden = np.where(np.arange(length) > positions[..., None], -np.inf, 0.0)[:, None]
        for layer in range(shape.layers):
            name = f"model.layers.{layer}"
            y = _norm(x, w[f"{name}.input_layernorm.weight"])
            q, k, v = (_heads(y @ w[f"{name}.self_attn.{part}_proj.weight"].T) for part in "qkv")
            cache.keys[layer][batch, positions] = _rotated(k, cos, sin)
            cache.values[layer][batch, positions] = v
            keys, values = (
                np.repeat(part[layer, :, :length], shape.heads // shape.kv_heads, axis=2).swapaxes(1, 2)
                for part in (cache.keys, cache.values)
            )
            scores = _rotated(q, cos, sin).swapaxes(1, 2) @ keys.swapaxes(2, 3) / np.sqrt(shape.head_size) + hidden
            mixed = (_softmax(scores) @ values).swapaxes(1, 2)
            x = x + mixed.reshape(*x.shape[:2], -1) @ w[f"{name}.self_attn.o_proj.weight"].T
            y = _norm(x, w[f"{name}.post_attention_layernorm.weight"])
            gate, up = y @ w[f"{name}.mlp.gate_proj.weight"].T, y @ w[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{name}.mlp.down_proj.weight"].T
        rows = w["lm_head.weight"][[*self.letters, self.other]]
        out: Array = _norm(x, w["model.norm.weight"]) @ rows.T
        return out

    def logits(self, tokens: Tokens) -> Array:
        """The same of whole texts, (B, T) token ids."""
        return self.extend(self.cache(*tokens.shape), tokens, np.zeros(len(tokens), dtype=np.int64))

    def next_logits(self, prompt: tuple[int, ...], texts: Tokens) -> Array:
        """Logits (B, T, letters + 1) before each token of (B, T) continuations (token ids) of one prompt."""
        rows = np.concatenate([np.tile(np.array(prompt, dtype=np.int64), (len(texts), 1)), texts], axis=1)
        parts = [self.logits(rows[first : first + 128, :-1]) for first in range(0, len(rows), 128)]
        return np.concatenate(parts)[:, len(prompt) - 1 :]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; characters that are no letters become the token `other`."""
        return [self.letters[at] if (at := LETTERS.find(one)) >= 0 else self.other for one in text]

    def numbers(self, tokens: list[int]) -> list[int]:
        """Which letter each token id is, 0 to 19; 20: none."""
        where = {token: number for number, token in enumerate(self.letters)}
        return [where.get(token, len(self.letters)) for token in tokens]

    def probabilities(
        self, logits: Array, temperature: float, top_k: int = 0, top_p: float = 1.0
    ) -> tuple[Array, NDArray[np.bool_]]:
        """What is sampled from: (…, letters + 1) probabilities, the last of all other tokens together, and where sure.

        Temperature, then top-k, then top-p, as transformers and vLLM have them (with one of them alone the order does
        not matter). Not sure (…): rows that rounding could cut between other tokens.
        """
        scaled = (logits - logits.max(axis=-1, keepdims=True)) / temperature
        scaled[..., -1] += np.log(self.vocab_size - len(self.letters))
        probs = _softmax(scaled)
        sure = np.ones(probs.shape[:-1], dtype=bool)
        if 0 < top_k < len(self.letters):
            ordered = -np.sort(-probs[..., :-1], axis=-1)
            last, next_ = ordered[..., top_k - 1], ordered[..., top_k]
            sure &= last - next_ > _NEAR * last
            probs = np.where(probs >= last[..., None], probs, 0.0)
            probs[..., -1] = 0.0
            probs /= probs.sum(axis=-1, keepdims=True)
        if top_p < 1:
            order = np.argsort(-probs, axis=-1, kind="stable")
            ordered = np.take_along_axis(probs, order, axis=-1)
            before = np.cumsum(ordered, axis=-1) - ordered
            kept = before < top_p
            sure &= (np.abs(before - top_p) > _NEAR).all(axis=-1)
            probs = np.zeros_like(probs)
            np.put_along_axis(probs, order, np.where(kept, ordered, 0.0), axis=-1)
            probs /= probs.sum(axis=-1, keepdims=True)
        return probs, sure


def make(seed: int) -> KnownModel:
    """A random model whose weights are float16 numbers, some 2 nats of entropy a token; `perturbed` makes its draft."""
    rng = np.random.default_rng([seed, 0])
    letters, size = letter_ids(), vocabulary_size()
    weights = {name: _draw(rng, name, *shape) for name, shape in _shapes(size).items()}
    head = weights["lm_head.weight"]
    others = np.setdiff1d(np.arange(size), letters)
    head[others] = 0.0
    head[others, 0] = -200.0
    return KnownModel(_float16(weights), letters, int(others[0]))


def perturbed(model: KnownModel, seed: int, share: float = 0.25) -> KnownModel:
    """A draft for it: the weights of its blocks and head mixed with noise of `share` of their size."""
    rng = np.random.default_rng([seed, 1])
    letters = np.array(model.letters)
    weights = {name: value.copy() for name, value in model.weights.items()}
    for name, value in weights.items():
        rows = letters if name == "lm_head.weight" else np.arange(len(value))
        if "norm" not in name and "embed" not in name:
            noise = rng.standard_normal(value[rows].shape) * value[rows].std() * share
            weights[name][rows] += np.where(value[rows] == 0, 0.0, noise)
    return KnownModel(_float16(weights), model.letters, model.other)


def read(folder: Path) -> tuple[KnownModel, KnownModel]:
    """Target and draft of a folder that `python -m runtime.audit model` wrote. Raises UserError for another one."""
    said = read_json(folder / DESCRIPTION) if (folder / DESCRIPTION).is_file() else {}
    if said.get("schema") != 1:
        raise UserError(
            f"{folder} has no {DESCRIPTION} that this version reads: write the model with python -m runtime.audit model"
        )
    return _read(folder / "target"), _read(folder / "draft")


def _read(folder: Path) -> KnownModel:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        found: dict[str, Any] = load(regular(folder / WEIGHTS).read_bytes())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error}): write the model again") from error
    letters, size = letter_ids(), vocabulary_size()
    shapes = {name: value.shape for name, value in found.items()}
    if shapes != _shapes(size):
        raise UserError(f"{folder / WEIGHTS} is not the audit's model: write it with python -m runtime.audit model")
    other = next(token for token in range(size) if token not in letters)
    return KnownModel({name: value.astype(np.float64) for name, value in found.items()}, letters, other)


def byte_alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes, sorted: the tokens 0 to 255."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return sorted(map(chr, [*kept, *range(0x100, 0x100 + 256 - len(kept))]))


# Engines want a merge and an end: neither is ever likely.
EXTRA = ("yz", "<|end|>")


def letter_ids() -> tuple[int, ...]:
    """The token ids of LETTERS."""
    alphabet = byte_alphabet()
    return tuple(alphabet.index(letter) for letter in LETTERS)


def vocabulary_size() -> int:
    """Tokens: the bytes, and EXTRA."""
    return 256 + len(EXTRA)


def _shapes(size: int) -> dict[str, tuple[int, ...]]:
    s = SHAPE
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size, s.hidden)}
    for layer in range(s.layers):
        name = f"model.layers.{layer}"
        found[f"{name}.input_layernorm.weight"] = (s.hidden,)
        found[f"{name}.self_attn.q_proj.weight"] = (s.heads * s.head_size, s.hidden)
        found[f"{name}.self_attn.k_proj.weight"] = (s.kv_heads * s.head_size, s.hidden)
        found[f"{name}.self_attn.v_proj.weight"] = (s.kv_heads * s.head_size, s.hidden)
        found[f"{name}.self_attn.o_proj.weight"] = (s.hidden, s.heads * s.head_size)
        found[f"{name}.post_attention_layernorm.weight"] = (s.hidden,)
        found[f"{name}.mlp.gate_proj.weight"] = (s.inner, s.hidden)
        found[f"{name}.mlp.up_proj.weight"] = (s.inner, s.hidden)
        found[f"{name}.mlp.down_proj.weight"] = (s.hidden, s.inner)
    return found | {"model.norm.weight": (s.hidden,), "lm_head.weight": (size, s.hidden)}


def _draw(rng: np.random.Generator, name: str, *shape: int) -> Array:
    if "norm" in name:
        return 1 + 0.1 * rng.standard_normal(shape)
    if "embed" in name:
        drawn = rng.standard_normal(shape)
        drawn[:, 0] = 1.0
        return drawn
    # Queries and keys are large, so that attention looks at some tokens more than at others.
    gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.5
    drawn = rng.standard_normal(shape) * gain / np.sqrt(shape[-1])
    if "o_proj" in name or "down_proj" in name:
        drawn[0] = 0.0
    return drawn


def _float16(weights: dict[str, Array]) -> dict[str, Array]:
    return {name: value.astype(np.float16).astype(np.float64) for name, value in weights.items()}


def _norm(x: Array, weight: Array) -> Array:
    out: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + SHAPE.epsilon) * weight
    return out


def _heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1, SHAPE.head_size)


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out
