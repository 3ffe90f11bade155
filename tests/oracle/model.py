"""The Llama family in float64, from config.json and the file's tensors, with a bound for float32 (balls.py).

Nothing here is the project's code: what is read, rotated, attended and mixed is written once more from its description.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.balls import Ball, Choices, attention, between, gamma, gated, linear, rms_norm, rotate, scaled, steps
from tests.oracle.files import Array, U, Weight, read_tensors, read_weight
from tests.oracle.gguf import read_gguf


class Oracle:
    """A model directory of the tests, or a GGUF file."""

    def __init__(self, folder: Path):
        self.weights: dict[str, Weight] = {}
        if folder.suffix == ".gguf":
            self.config, self.tensors, self.weights = read_gguf(folder)
            self.quantization, self.gemma = None, self.config["model_type"] == "gemma"
            return
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = read_tensors(folder / "model.safetensors")
        self.quantization = self.config.get("quantization_config")
        self.gemma = self.config["model_type"] == "gemma"
        # compressed-tensors says how many bits words hold in the group that a layer is of.
        for group in (self.quantization or {}).get("config_groups", {}).values():
            for prefix in group["targets"]:
                self.tensors[f"{prefix}.bits"] = np.array(group["weights"]["num_bits"])

    def logits(self, tokens: Array, cache: str, choices: Choices) -> tuple[Array, Array]:
        """(T, V) logits of a text, and how far float32 arithmetic with the same choices may lie from each.

        cache    "float32", "float16", "int8" or "int4": how keys and values are held.
        choices  given `model.layers.N hidden` and `probed` (T, K) it goes on from there: what the model's first N + 1
                 blocks alone have behind the final norm, and with PROBE added to each row's first number before it.
        """
        x = self.tensors["model.embed_tokens.weight"][tokens]
        if self.gemma:
            x = x * self.config["hidden_size"] ** 0.5
        # A product and a difference where the table is of blocks; the scale, and the product with it.
        blocks = self.weight("model.embed_tokens").scale is not None
        ball = Ball(x, ((2 * U if blocks else 0) + (2 * U if self.gemma else 0)) * np.abs(x))
        unit, weight = None, self._norm_weight("model.norm", self.gemma)
        for number in range(self.config["num_hidden_layers"]):
            ball = self._block(ball, unit, number, cache, choices)
            if (hidden := choices.given.get(f"model.layers.{number} hidden")) is not None:
                eps, probed = self.config["rms_norm_eps"], choices.given[f"model.layers.{number} probed"]
                normed, before = rms_norm(ball, weight, eps), ball
                ball, unit, length = between(hidden, probed, weight)
                # A root mean square moves by no more than this.
                far = before.r[:, None] / before.x.shape[1] ** 0.5 + length * (ball.e / np.abs(ball.x)).max(1)[:, None]
                ours = np.sqrt((before.x**2).mean(axis=1, keepdims=True) + eps)
                off = np.concatenate((normed.x - hidden, ours - length), axis=1)
                zero = np.zeros(off.shape)
                choices.check(off, zero, zero, np.concatenate((normed.e, far), axis=1), pins=True)
        name = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        normed = self._norm(ball, "model.norm", self.gemma)
        bias = self.tensors.get("lm_head.bias")
        head = self.weight(name)
        found = linear(normed, replace(head, bias=bias), choices, "head")
        return found.x, found.e

    def weight(self, prefix: str) -> Weight:
        """The layer of that name; read once."""
        if prefix not in self.weights:
            self.weights[prefix] = read_weight(self.tensors, self.quantization, prefix)
        return self.weights[prefix]

    def _norm_weight(self, name: str, plus_one: bool) -> Array:
        return self.tensors[f"{name}.weight"] + (1.0 if plus_one else 0.0)

    def _norm(self, ball: Ball, name: str, plus_one: bool) -> Ball:
        return rms_norm(ball, self._norm_weight(name, plus_one), self.config["rms_norm_eps"])

    def _block(self, ball: Ball, unit: Ball | None, number: int, cache: str, choices: Choices) -> Ball:
        """unit: the stream over its length, where that is known better than the stream."""
        base = f"model.layers.{number}"
        name = f"{base}.input_layernorm"
        if unit is None:
            normed = self._norm(ball, name, self.gemma)
        else:
            normed = scaled(unit, self._norm_weight(name, self.gemma))
        ball = ball + self._attend(normed, number, cache, choices)
        normed = self._norm(ball, f"{base}.post_attention_layernorm", self.gemma)
        for experts in (f"{base}.block_sparse_moe", f"{base}.mlp"):
            if f"{experts}.gate.weight" in self.tensors:
                return ball + self._mix(normed, experts, choices)
        return ball + self._mlp(normed, f"{base}.mlp", ("gate_proj", "up_proj", "down_proj"), choices)

    def _mlp(self, ball: Ball, base: str, names: tuple[str, str, str], choices: Choices) -> Ball:
        if f"{base}.gate_up_proj.weight" in self.tensors or self.config["model_type"] == "phi3":
            both = linear(ball, self.weight(f"{base}.gate_up_proj"), choices, f"{base} in")
            half = both.x.shape[1] // 2
            gate, up = both.columns(slice(half)), both.columns(slice(half, None))
        else:
            gate, up = (linear(ball, self.weight(f"{base}.{name}"), choices, f"{base} in") for name in names[:2])
        inner = gated(gate, up, self.config["hidden_act"])
        return linear(inner, self.weight(f"{base}.{names[2]}"), choices, f"{base} out")

    def _mix(self, ball: Ball, base: str, choices: Choices) -> Ball:
        """Top k of a softmax over the router. Shares move as attention's weights do: by e^±2D of the scores' error.

        Which experts are chosen is for our scores to say, where their errors leave no choice (`Choices.top`).
        """
        config = self.config
        mixtral = config["model_type"] == "mixtral"
        scores = linear(ball, self.weight(f"{base}.gate"), choices, f"{base} router")
        odds = np.exp(scores.x - scores.x.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        k, count = config["num_experts_per_tok"], odds.shape[1]
        chosen = choices.top(base, scores, k)
        share = np.take_along_axis(odds, chosen, axis=1)
        if mixtral or config.get("norm_topk_prob"):
            share = share / share.sum(axis=1, keepdims=True)
        most = scores.e.max(axis=1)
        spread = np.ptp(scores.x, axis=1) + 2 * most
        moved = (np.exp(2 * (most + U * spread) + gamma(2 * count + 12)) - 1)[:, None]
        y, far, total = (np.zeros(ball.x.shape) for _ in range(3))
        for number in range(count):
            at, place = np.nonzero(chosen == number)
            if len(at):
                # All rows are computed, so that choices count them by their numbers.
                part, weight = self._expert(ball, base, number, mixtral, choices), np.zeros((len(ball.x), 1))
                weight[at, 0] = share[at, place]
                y += weight * part.x
                size = np.abs(part.x) + part.e
                far += weight * (part.e + moved * size)
                total += weight * (1 + moved) * size
        return Ball(y, far + gamma(k + 1) * total)

    def _expert(self, ball: Ball, base: str, number: int, mixtral: bool, choices: Choices) -> Ball:
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        prefix = f"{base}.experts.{number}"
        if (stack := self.tensors.get(f"{base}.experts.gate_up_proj")) is not None:
            down = self.tensors[f"{base}.experts.down_proj"]
            both = np.split(stack[number], 2)
            parts = zip(names, (*both, down[number]), strict=True)
            self.weights |= {f"{prefix}.{name}": Weight(part) for name, part in parts}
        return self._mlp(ball, prefix, names, choices)

    def _attend(self, ball: Ball, number: int, cache: str, choices: Choices) -> Ball:
        config, base = self.config, f"model.layers.{number}.self_attn"
        d, heads, kv_heads = (config[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        if config["model_type"] == "phi3":
            whole = linear(ball, self.weight(f"{base}.qkv_proj"), choices, f"{base} in")
            cut = np.cumsum([0, heads, kv_heads, kv_heads]) * d
            q, k, v = (whole.columns(slice(*ends)) for ends in pairwise(cut))
        else:
            names = ("q_proj", "k_proj", "v_proj")
            q, k, v = (linear(ball, self.weight(f"{base}.{name}"), choices, f"{base} in") for name in names)
        q, k, v = (part.heads(d) for part in (q, k, v))
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            q, k = self._norm(q, f"{base}.q_norm", False), self._norm(k, f"{base}.k_norm", False)
        table = angles(config, len(ball.x))
        q, k = rotate(q, *table), rotate(k, *table)
        k, v = held(k, cache, choices, f"{base} keys"), held(v, cache, choices, f"{base} values")
        mixed = attention(q, k, v, self._window(number))
        return linear(mixed, self.weight(f"{base}.o_proj"), choices, f"{base} out")

    def _window(self, number: int) -> int | None:
        config = self.config
        window = config.get("sliding_window")
        if window is None or (config["model_type"].startswith("qwen") and not config.get("use_sliding_window")):
            return None
        kinds = config.get("layer_types")
        return window if kinds is None or kinds[number] == "sliding_attention" else None


def held(ball: Ball, cache: str, choices: Choices, site: str) -> Ball:
    """Keys or values (T, heads, d) as a cache gives them back: what it holds, checked; codes times absmax / limit."""
    given = choices.given[site]
    if cache == "float32":
        choices.check(ball.x, given, given, ball.e)
        return Ball(given, np.zeros(given.shape))
    if cache == "float16":
        half = given.astype(np.float16)
        low, high = (np.nextafter(half, np.float16(side)).astype(float) for side in (-np.inf, np.inf))
        choices.check(ball.x, (low + given) / 2, (given + high) / 2, ball.e)
        return Ball(given, np.zeros(given.shape))
    step, error, slack = steps(ball.x, ball.e, {"int8": 127.0, "int4": 7.0}[cache])
    t = np.divide(ball.x, step, out=np.zeros(ball.x.shape), where=step > 0)
    choices.check(t, given - 0.5, given + 0.5, slack)
    return Ball(given * step, np.abs(given * step) * (error + 2 * U))


def angles(config: dict[str, Any], count: int) -> tuple[Array, Array, Array]:
    """cos and sin (count, half) at positions 0 …, and how far float32's may lie.

    A frequency is base^−e, e = 2i / dimensions: e is rounded (which counts e ln(base) times), the power within two
    units in the last place (4u), its inverse. What scaling adds, its lines say. The angle is one more product; cosines
    and sines of it are within two units, and the factor is one rounding.
    """
    rope = config["rope_parameters"]
    base, kind = rope["rope_theta"], rope["rope_type"]
    rotated = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    e = np.arange(0, rotated, 2) / rotated
    inverse = base**-e
    far, factor = inverse * gamma(6) + inverse * U * e * np.log(base), 1.0
    if kind == "linear":
        inverse, far = inverse / rope["factor"], far / rope["factor"] + U * inverse
    elif kind == "llama3":
        inverse, far = _llama3(rope, inverse, far)
    elif kind == "yarn":
        inverse, far, factor = _yarn(rope, inverse, far, rotated)
    positions = np.arange(count)[:, None]
    angle = positions * inverse
    error = positions * far * (1 + U) + U * angle
    return factor * np.cos(angle), factor * np.sin(angle), factor * (error + gamma(6))


def _llama3(rope: dict[str, Any], inverse: Array, far: Array) -> tuple[Array, Array]:
    """Long waves are stretched, short ones stay, and between both it is a mixture."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    waves = rope["original_max_position_embeddings"] * inverse / (2 * np.pi)
    smooth = np.clip((waves - low) / (high - low), 0, 1)
    mixed = (1 - smooth) * inverse / factor + smooth * inverse
    # The mixture's weight is a difference: its error is one of `waves`, four roundings and the frequency's own.
    moved = (waves * (gamma(5) + far / inverse) + high * U) / (high - low) + 2 * U
    return mixed, far + inverse * (np.minimum(moved, 1) + gamma(5))


def _yarn(rope: dict[str, Any], inverse: Array, far: Array, rotated: int) -> tuple[Array, Array, float]:
    """A ramp from the original frequencies to stretched ones, over whole dimensions."""
    base, factor, length = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return rotated * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base))

    low, high = max(np.floor(dimension(32)), 0), min(np.ceil(dimension(1)), rotated - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(rotated // 2) - low) / (high - low), 0, 1)
    mixed = inverse / factor * ramp + inverse * (1 - ramp)
    # The ramp is a quotient of small integers (or of 0.001): its roundings, then two products and a sum.
    return mixed, far + inverse * gamma(8), 0.1 * np.log(factor) + 1
