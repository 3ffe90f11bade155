"""Small random checkpoints, odd in every size, in every layout that is read from safetensors: codes are random bits.

They are written from the layouts' descriptions, not by this project's packers, so that whoever reads them with code of
his own (tests/oracle/) shares nothing with runtime/formats/ but those descriptions.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

FAMILY = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe")
LIBRARIES = ("plain", "compressed-tensors", "nf4", "llm_int8", "bitnet", "gptq", "awq", "compressed-tensors")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Drawn:
    """config.json and the tensors of a model; `label` says what it is."""

    label: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """As a model directory without a tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / "model.safetensors")
        return folder


class Stable:
    """What `draw` asks of numpy's generators, the same on every machine and by every numpy.

    From Philox's raw words, which numpy promises not to change, by operations that IEEE 754 rounds.
    """

    def __init__(self, seed: int):
        self._words = np.random.Philox(key=seed)

    def random(self, size: Any = None) -> Any:
        words = self._words.random_raw(math.prod(np.atleast_1d(1 if size is None else size)))
        numbers = (words >> np.uint64(11)) * 2.0**-53
        return float(numbers[0]) if size is None else numbers.reshape(size)

    def integers(self, low: Any, high: Any = None, size: Any = None, endpoint: bool = False) -> Any:
        low, high = (0, low) if high is None else (low, high)
        found = low + np.floor(self.random(size) * (high - low + endpoint))
        return int(found) if size is None else found.astype(np.int64)

    def uniform(self, low: float, high: float, size: Any = None) -> Any:
        return low + self.random(size) * (high - low)

    def standard_normal(self, size: Any) -> Any:
        """Nearly so: the sum of twelve uniform numbers, less six."""
        total = np.zeros(size)
        for _ in range(12):
            total = total + self.random(size)
        return total - 6.0

    def choice(self, options: Any) -> Any:
        return np.asarray(options)[self.integers(len(options))]

    def permutation(self, values: Any) -> Any:
        return np.asarray(values)[np.argsort(self.random(len(values)), kind="stable")]


def draw(seed: int, deepest: int = 3, rng: Any = None) -> Drawn:
    """The model of a number: families and libraries in turn, everything else by chance; at most `deepest` blocks.

    rng  what chance is; None: numpy's default generator.
    """
    rng = np.random.default_rng(seed) if rng is None else rng
    family, library = FAMILY[seed % 8], LIBRARIES[seed // 8 % 8]
    made = Drawn(f"{seed} {family} {library}", _config(family, rng, deepest))
    config, dtype = made.config, _FLOATS[rng.integers(3)]
    config["dtype"] = str(dtype).removeprefix("torch.")
    hidden, offset = config["hidden_size"], 1.0 if family == "gemma" else 0.0

    def plain(*shape: int, spread: float, middle: float = 0.0) -> Tensor:
        return torch.from_numpy(rng.standard_normal(shape) * spread + middle).to(dtype)

    made.tensors["model.embed_tokens.weight"] = plain(config["vocab_size"], hidden, spread=1 / math.sqrt(hidden))
    made.tensors["model.norm.weight"] = plain(hidden, spread=0.1, middle=1 - offset)
    for number in range(config["num_hidden_layers"]):
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if family in ("qwen3", "qwen3_moe"):
            norms |= {"self_attn.q_norm": config["head_dim"], "self_attn.k_norm": config["head_dim"]}
        for name, size in norms.items():
            made.tensors[f"model.layers.{number}.{name}.weight"] = plain(size, spread=0.1, middle=1 - offset)
    packer = _Packer(rng, library, dtype)
    for prefix, outputs, inputs in linears(config):
        part = prefix.rsplit(".", 1)[-1]
        routed = ".experts." in prefix or part == "gate"
        packed = None if part in ("lm_head", "gate") or rng.random() < 0.1 else packer.pack(prefix, outputs, inputs)
        tensors = {"weight": plain(outputs, inputs, spread=1 / math.sqrt(inputs))} if packed is None else packed
        if not routed and (rng.random() < 0.2 or (family == "qwen2" and part in ("q_proj", "k_proj", "v_proj"))):
            tensors["bias"] = plain(outputs, spread=0.1)
        made.tensors |= {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}
    if library == "plain" and family in ("mixtral", "qwen3_moe") and rng.random() < 0.5:
        _fuse_experts(made)
    if packer.packed:
        config["quantization_config"] = packer.describe()
    return made


def _config(family: str, rng: np.random.Generator, deepest: int) -> dict[str, Any]:
    pick = rng.choice
    kv_heads, layers = int(rng.integers(1, 4)), min(int(rng.integers(1, 4)), deepest)
    heads, head_dim = kv_heads * int(rng.integers(1, 4)), int(pick([4, 6, 8, 10, 16, 16, 20, 32, 40]))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": int(pick([16, 24, 32, 36, 48, 50, 64, 64, 72, 96, 128])),
        "intermediate_size": int(pick([16, 40, 44, 64, 72, 96, 128, 150])),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": int(rng.integers(33, 110)),
        "max_position_embeddings": 256,
        "rms_norm_eps": float(pick([1e-5, 1e-6])),
        "hidden_act": str(pick(["silu", "gelu_pytorch_tanh"])),
        "tie_word_embeddings": bool(rng.random() < 0.5),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "rope_parameters": _rope(family, head_dim, rng),
    }
    if family == "llama":
        # transformers wants it so, for whatever reason, where the file leaves anything to it.
        config["hidden_size"] = heads * int(pick([6, 8, 12, 16, 25]))
    if family == "gemma":
        config["hidden_activation"] = config["hidden_act"]
    if rng.random() < (0.6 if family == "mistral" else 0.25):
        config |= {"sliding_window": int(rng.integers(1, 30)), "use_sliding_window": True}
        if family != "mistral":  # With them transformers makes it another family's.
            config["layer_types"] = [str(pick(["full_attention", "sliding_attention"])) for _ in range(layers)]
    if family in ("mixtral", "qwen3_moe"):
        count = int(rng.integers(2, 6))
        name = "num_local_experts" if family == "mixtral" else "num_experts"
        config |= {name: count, "num_experts_per_tok": int(rng.integers(1, count + 1))}
    if family == "qwen3_moe":
        dense = [i for i in range(layers) if rng.random() < 0.3]
        config |= {"moe_intermediate_size": int(pick([16, 24, 40, 64])), "norm_topk_prob": bool(rng.random() < 0.5)}
        config |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return config


def _rope(family: str, head_dim: int, rng: np.random.Generator) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(rng.choice([1e4, 5e5, 1e6]))}
    if family == "phi3":
        if head_dim % 4 == 0 and rng.random() < 0.6:
            rope["partial_rotary_factor"] = 0.5
        return rope
    match int(rng.integers(6)):
        case 3:
            rope |= {"rope_type": "linear", "factor": 2.5}
        case 4:
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = 64
        case 5:
            rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return rope


def linears(config: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(prefix, outputs, inputs) of every linear layer that the checkpoint stores by itself."""
    hidden, family, size = config["hidden_size"], config["model_type"], config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    found = [] if config["tie_word_embeddings"] else [("lm_head", config["vocab_size"], hidden)]
    for number in range(config["num_hidden_layers"]):
        block = f"model.layers.{number}"
        attention = [("qkv_proj", queries + 2 * keys)] if family == "phi3" else []
        attention = attention or [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]
        found += [(f"{block}.self_attn.{name}", outputs, hidden) for name, outputs in attention]
        found.append((f"{block}.self_attn.o_proj", hidden, queries))
        if family == "phi3":
            found += [(f"{block}.mlp.gate_up_proj", 2 * size, hidden), (f"{block}.mlp.down_proj", hidden, size)]
            continue
        names, bases, width = ("gate_proj", "up_proj", "down_proj"), [f"{block}.mlp"], size
        if family == "mixtral" or (family == "qwen3_moe" and number not in config["mlp_only_layers"]):
            base = f"{block}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}"
            count = config.get("num_local_experts") or config["num_experts"]
            found.append((f"{base}.gate", count, hidden))
            bases = [f"{base}.experts.{i}" for i in range(count)]
            names = ("w1", "w3", "w2") if family == "mixtral" else names
            width = config.get("moe_intermediate_size", size)
        for base in bases:
            found += [(f"{base}.{names[0]}", width, hidden), (f"{base}.{names[1]}", width, hidden)]
            found.append((f"{base}.{names[2]}", hidden, width))
    return found


def _fuse_experts(made: Drawn) -> None:
    """Plain experts as transformers 5 writes them: (E, 2I, H) and (E, H, I)."""
    one, tensors = ("w1", "w3", "w2") if made.config["model_type"] == "mixtral" else ("gate_proj", "up_proj", ""), made
    names = [name for name in tensors.tensors if name.endswith(f".experts.0.{one[0]}.weight")]
    down = one[2] or "down_proj"
    for base in (name.split(".experts.")[0] for name in names):
        parts: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        number = 0
        while f"{base}.experts.{number}.{down}.weight" in made.tensors:
            take = [made.tensors.pop(f"{base}.experts.{number}.{name}.weight") for name in (one[0], one[1], down)]
            parts["gate_up_proj"].append(torch.cat(take[:2]))
            parts["down_proj"].append(take[2])
            number += 1
        made.tensors |= {f"{base}.experts.{name}": torch.stack(each) for name, each in parts.items()}


class _Packer:
    """Draws layers in one library's layouts, and keeps account of what its configuration has to say of them."""

    def __init__(self, rng: np.random.Generator, library: str, dtype: torch.dtype):
        self.rng, self.library, self.dtype = rng, library, dtype
        self.packed: list[str] = []
        self.groups: dict[str, dict[str, Any]] = {}
        # What one file has one of: how int8 rows round their inputs, GPTQ's bits and groups, the ternary scale's sense.
        self.weights_only = bool(rng.random() < 0.3)
        self.bits, self.size = int(rng.choice([2, 3, 4, 8])), int(rng.choice([-1, 8, 12, 16, 32]))
        self.version, self.multiply = str(rng.choice(["gptq", "gptq_v2"])), bool(rng.random() < 0.4)

    def pack(self, prefix: str, n: int, k: int) -> dict[str, Tensor] | None:
        """A layer's tensors by the last part of their names; None where the layout does not hold its shape."""
        makers: dict[str, Callable[[str, int, int], dict[str, Tensor] | None]] = {
            "compressed-tensors": self._compressed,
            "nf4": self._nf4,
            "llm_int8": self._llm_int8,
            "bitnet": self._bitnet,
            "gptq": self._gptq,
            "awq": self._awq,
        }
        found = makers[self.library](prefix, n, k) if self.library in makers else None
        if found is not None:
            self.packed.append(prefix)
        return found

    def describe(self) -> dict[str, Any]:
        """`quantization_config`."""
        match self.library:
            case "nf4":
                return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
            case "llm_int8":
                return {"quant_method": "bitsandbytes", "load_in_8bit": True}
            case "bitnet":
                kind = "autobitlinear" if self.multiply else "bitlinear"
                return {"quant_method": "bitnet", "linear_class": kind, "quantization_mode": "offline"}
            case "gptq":
                about = {"bits": self.bits, "group_size": self.size, "checkpoint_format": self.version}
                return {"quant_method": "gptq"} | about
            case "awq":
                return {"quant_method": "awq", "bits": 4, "group_size": self.size, "version": "gemm"}
        about = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": []}
        return about | {"format": "mixed-precision", "config_groups": self.groups}

    def _scales(self, *shape: int, codes: float, inputs: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scales that give weights of variance 1 / inputs to codes of that spread."""
        middle = 1 / (codes * math.sqrt(inputs))
        values = torch.from_numpy(self.rng.uniform(0.6, 1.4, shape) * middle)
        return values.to(_FLOATS[self.rng.integers(3)] if dtype is None else dtype)

    def _divisor(self, k: int, least: int = 4) -> int:
        """A number of inputs that divides a row."""
        return int(self.rng.choice([d for d in range(least, k + 1) if k % d == 0]))

    def _codes(self, *shape: int, low: int, high: int) -> np.ndarray:
        return self.rng.integers(low, high, shape, endpoint=True)

    def _order(self, k: int, size: int) -> Tensor:
        return torch.from_numpy(self.rng.permutation(np.arange(k) // size).astype(np.int32))

    def _compressed(self, prefix: str, n: int, k: int) -> dict[str, Tensor] | None:
        expert = ".experts." in prefix
        kind = str(self.rng.choice(["int8", "static", "words", "words", "words", "fp8"]))
        if expert:
            kind = "words8" if self.rng.random() < 0.4 else "words"
        inputs = None if self.weights_only else {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
        if kind == "static":
            inputs = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
        weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        form = "int-quantized"
        if kind in ("int8", "static"):
            made = self._rows(n, k, kind == "static")
            if kind == "static":
                step = self.rng.uniform(0.015, 0.03)
                made["input_scale"] = torch.tensor([step], dtype=torch.float32)
        elif kind == "fp8":
            form, inputs, weights["type"] = "float-quantized", None, "float"
            made = self._fp8(n, k)
        else:
            form = "pack-quantized"
            bits = 8 if kind == "words8" else int(self.rng.choice([2, 3, 4]))
            inputs = inputs if bits == 8 else None
            made = self._words(n, k, bits, expert)
            size = k // made["weight_scale"].shape[1]
            weights |= {"num_bits": bits, "symmetric": "weight_zero_point" not in made, "strategy": "group"}
            weights |= {"group_size": size} if size < k or self.rng.random() < 0.5 else {"strategy": "channel"}
            if "weight_g_idx" in made:
                weights["actorder"] = "group"
        key = json.dumps([form, weights, inputs])
        group = {"format": form, "weights": weights, "input_activations": inputs, "targets": []}
        self.groups.setdefault(key, group)["targets"].append(prefix)
        return made

    def _rows(self, n: int, k: int, static: bool) -> dict[str, Tensor]:
        codes = self._codes(n, k, low=-128, high=127)
        grouped = not static and self.rng.random() < 0.2
        groups = k // self._divisor(k) if grouped else 1
        shape = (n, groups) if grouped else ((n, 1), (n,), (1,))[self.rng.integers(3)]
        made = {
            "weight": torch.from_numpy(codes.astype(np.int8)),
            "weight_scale": self._scales(*shape, codes=74, inputs=k),
        }
        if self.rng.random() < 0.3:
            made["weight_zero_point"] = torch.from_numpy(self._codes(*shape, low=-9, high=9).astype(np.int8))
        return made

    def _fp8(self, n: int, k: int) -> dict[str, Tensor]:
        octets = self._codes(n, k, low=0, high=255)
        # The two NaN of E4M3, and its largest binade, become small numbers.
        octets = np.where((octets & 0x7F) >= 0x70, octets & 0x8F, octets).astype(np.uint8)
        shape = ((n, 1), (n,), (1,))[self.rng.integers(3)]
        weight = torch.from_numpy(octets).view(torch.float8_e4m3fn)
        # fsum: torch's own sums have other last bits on other processors.
        spread = math.sqrt(math.fsum(value * value for value in weight.float().flatten().tolist()) / (n * k))
        scale = self._scales(*shape, codes=spread, inputs=k, dtype=torch.float32)
        return {"weight": weight, "weight_scale": scale.to(_FLOATS[self.rng.integers(2)])}

    def _words(self, n: int, k: int, bits: int, symmetric: bool) -> dict[str, Tensor]:
        size, half = self._divisor(k), 1 << bits - 1
        groups = k // size
        made = {
            "weight_packed": words(self._codes(n, k, low=0, high=2 * half - 1), bits),
            "weight_scale": self._scales(n, groups, codes=half * 0.6, inputs=k),
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric and self.rng.random() < 0.5:
            zeros = self._codes(groups, n, low=half - 1, high=half + 1)
            made["weight_zero_point"] = words(zeros, bits).t()
        if not symmetric and groups > 1 and self.rng.random() < 0.4:
            made["weight_g_idx"] = self._order(k, size)
        return made

    def _nf4(self, prefix: str, n: int, k: int) -> dict[str, Tensor] | None:
        blocks = [size for size in (4, 8, 12, 16, 24, 32, 48, 64, 128) if k % size == 0]
        if not blocks or n * k % 2:
            return None
        block = int(self.rng.choice(blocks))
        count = n * k // block
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": [n, k]}
        made = {
            "weight": torch.from_numpy(self._codes(n * k // 2, 1, low=0, high=255).astype(np.uint8)),
            "weight.quant_map": torch.tensor(NF4, dtype=torch.float32),
        }
        middle = 1.6 / math.sqrt(k)
        if self.rng.random() < 0.6:
            inner = int(self.rng.choice([16, 64, 256]))
            made["weight.absmax"] = torch.from_numpy(self._codes(count, low=0, high=255).astype(np.uint8))
            made["weight.nested_absmax"] = torch.from_numpy(
                self.rng.uniform(0.2, 0.5, -(-count // inner)).astype(np.float32) * np.float32(middle)
            )
            table = np.sort(self.rng.uniform(-1, 1, 256)).astype(np.float32)
            made["weight.nested_quant_map"] = torch.from_numpy(table)
            state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": float(np.float32(middle))}
        else:
            made["weight.absmax"] = self._scales(count, codes=0.6, inputs=k, dtype=torch.float32)
        described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return made | {"weight.quant_state.bitsandbytes__nf4": described}

    def _llm_int8(self, prefix: str, n: int, k: int) -> dict[str, Tensor]:
        return {
            "weight": torch.from_numpy(self._codes(n, k, low=-127, high=127).astype(np.int8)),
            "SCB": self._scales(n, codes=74 / 127, inputs=k, dtype=torch.float32),
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def _bitnet(self, prefix: str, n: int, k: int) -> dict[str, Tensor] | None:
        if n % 4:
            return None
        fields = self._codes(4, n // 4, k, low=0, high=2)
        packed = sum(fields[i] << 2 * i for i in range(4)).astype(np.uint8)
        scale = self._scales(1, codes=0.8, inputs=k)
        return {"weight": torch.from_numpy(packed), "weight_scale": scale if self.multiply else 1 / scale}

    def _gptq(self, prefix: str, n: int, k: int) -> dict[str, Tensor] | None:
        size, half = (k if self.size == -1 else self.size), 1 << self.bits - 1
        # A short last group is read as equal parts of at least four inputs, the greatest that cut both sizes.
        if np.gcd(size, k) < 4 or size > k:
            return None
        groups = -(-k // size)
        v1 = self.version == "gptq"
        zeros = self._codes(groups, n, low=half - 1, high=half + 1) if self.rng.random() < 0.6 else half
        made = {
            "qweight": words(self._codes(n, k, low=0, high=2 * half - 1), self.bits).t(),
            "qzeros": words(np.broadcast_to(zeros - v1, (groups, n)) & (2 * half - 1), self.bits),
            "scales": self._scales(groups, n, codes=half * 0.6, inputs=k),
            "g_idx": torch.arange(k, dtype=torch.int32) // size,
        }
        if k % size == 0 and self.rng.random() < 0.5:
            made["g_idx"] = self._order(k, size)
        return made

    def _awq(self, prefix: str, n: int, k: int) -> dict[str, Tensor] | None:
        size = k if self.size == -1 else self.size
        if n % 8 or k % size:
            return None
        order = np.array([0, 2, 4, 6, 1, 3, 5, 7])

        def packed(codes: np.ndarray) -> Tensor:
            return words(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(len(codes), -1), 4)

        zeros = self._codes(k // size, n, low=7, high=9) if self.rng.random() < 0.7 else np.full((k // size, n), 8)
        scales = self._scales(k // size, n, codes=4.6, inputs=k)
        return {"qweight": packed(self._codes(k, n, low=0, high=15)), "qzeros": packed(zeros), "scales": scales}


def words(values: np.ndarray, bits: int) -> Tensor:
    """(rows, n) numbers below 2^bits as int32 words, the first in the lowest bits, rows filled up with zeros."""
    stream = (values[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view("<i4"))


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
