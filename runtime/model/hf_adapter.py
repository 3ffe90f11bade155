"""The Decoder contract over any other transformers causal LM."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.errors import UserError, fault_of
from runtime.model import hf_cache
from runtime.model.chains import ChainDecoder
from runtime.model.hf_cache import State
from runtime.model.hf_classes import auto_class
from runtime.model.hf_probe import Capability, Steps, probe

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Through:
    """How transformers is to run a model: the type it computes in, and accelerate's spreading over devices.

    device_map  "auto", "balanced", … (transformers' own words): several GPUs, and the host where they do not suffice;
                None: all on the one device.

    Raises UserError for another dtype.
    """

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device_map: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UserError(f"dtype must be one of {', '.join(_DTYPES)}, found {self.dtype!r}")


FLOAT32 = Through()


class Adapter(ChainDecoder):
    """A Decoder over a transformers model. What its cache can do is measured when it is first asked for."""

    kernels = "transformers"

    def __init__(self, model: Any):
        self.model = model
        # Of a composite model that of the language model inside.
        self.config = config = model.config.get_text_config(decoder=True)
        self.name = type(model).__name__
        head = _head(model, self.name)
        self.vocab_size: int = head.shape[0]
        self.hidden_size: int = getattr(config, "hidden_size", None) or head.shape[1]
        self.max_positions: int = max(getattr(config, "max_position_embeddings", None) or 2048, 0) or 2048  # XLNet: −1
        self.device: torch.device = model.device
        takes = [name for name in ("past_key_values", "cache_params") if name in signature(model.forward).parameters]
        # Other arguments are ignored without a word: such a model reads all of a text again at each forward.
        self.cache_name = takes[0] if takes and model._supports_default_dynamic_cache() else None
        through = f"{self.name} runs through transformers"
        self.no_kinds = (
            f"{through}, whose caches are neither quantised nor paged here; leave out the kind of cache and the pages."
        )
        self.no_trees = f"{through}, which takes chains of tokens and no trees; choose another drafter than tree."

    @cached_property
    def capability(self) -> Capability:
        """How the model's cache serves. Raises UserError where the model does not run on tokens alone."""
        with torch.inference_mode():
            rounds = self.model.dtype != torch.float32 or getattr(self.model, "is_quantized", False)
            caches = self.cache_name is not None
            return probe(self.name, self.vocab_size, self._all_logits, self._empty, self.cut, caches, rounds)

    @property
    def no_drafts(self) -> str:
        """See ChainDecoder."""
        return self.capability.no_drafts

    @property
    def threads(self) -> int:
        """torch's, which transformers uses."""
        return torch.get_num_threads()

    def empty(self) -> State:
        return self._empty(self.capability.steps)

    def length(self, state: State) -> int:
        return state.tokens

    def cut(self, state: State, length: int) -> State:
        """See ChainDecoder. Raises UserError where this model's cache cannot roll back."""
        if isinstance(state.cache, Tensor):
            return State(state.cache[:length], length)
        if length == 0:
            return self.empty()
        hf_cache.crop(state.cache, state.tokens - length, self.name)
        return State(state.cache, length)

    def bytes_per_token(self) -> int:
        """Keys and values over all layers, in the model's dtype."""
        config = self.config
        all_heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "num_hidden_layers", 0)
        if getattr(config, "is_heterogeneous", False):
            # Layers of several shapes, of which the last may keep nothing.
            kept = range(layers - (getattr(config, "num_kv_shared_layers", 0) or 0))
            each = [config.per_layer_config[layer] for layer in kept]
            return int(sum(2 * of.num_key_value_heads * of.head_dim for of in each) * self.model.dtype.itemsize)
        heads = getattr(config, "num_key_value_heads", None) or all_heads
        if not (isinstance(heads, int) and heads and all_heads) or self.capability.steps == "anew":
            return 0  # states that do not grow, or tokens alone
        dim = getattr(config, "head_dim", None) or self.hidden_size // all_heads
        return int(2 * layers * heads * dim * self.model.dtype.itemsize)

    def run(self, tokens: Tensor, state: State, at: Sequence[int]) -> list[tuple[Tensor, ...]]:
        return self._run(tokens, state, at, self.capability.steps)

    def _empty(self, steps: Steps) -> State:
        from transformers import DynamicCache

        if steps == "anew":
            return State(torch.empty(0, dtype=torch.int64))
        with fault_of(self.name, "transformers cannot make its cache"):
            return State(hf_cache.begin(DynamicCache(config=self.model.config)))

    def _all_logits(self, tokens: Tensor, state: State, steps: Steps) -> Tensor:
        rows = self._run(tokens, state, range(len(tokens)), steps)
        return torch.stack([row[0] for row in rows]).float().cpu()

    def _run(self, tokens: Tensor, state: State, at: Sequence[int], steps: Steps) -> list[tuple[Tensor, ...]]:
        if state.tokens and len(tokens) > 1 and steps == "single":
            parts = [
                self._run(token, state, [0] if row in at else [], steps) for row, token in enumerate(tokens.split(1))
            ]
            return [found for part in parts for found in part]
        if steps == "anew":
            at = [state.tokens + row for row in at]
            state.cache = tokens = torch.cat([state.cache, tokens.cpu()])
            state.tokens, held = 0, {"use_cache": False} if self.cache_name else {}
        else:
            held = {str(self.cache_name): state.cache, "use_cache": True}
        try:
            out = self.model(
                input_ids=tokens.view(1, -1).to(self.device),
                output_hidden_states=True,
                logits_to_keep=torch.tensor(at or [0], device=self.device),
                **held,
            )
        except Exception as error:  # somebody else's layers raise whatever they do
            if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and self.device.type != "cpu"):
                raise  # what the device says is explained elsewhere
            why = " ".join(str(error).split())[:200]
            how = "on tokens alone" if steps == "anew" else "token by token on transformers' cache that grows"
            raise UserError(f"{self.name} does not run {how}: {type(error).__name__}: {why}") from error
        state.tokens += len(tokens)
        if steps != "anew":
            hf_cache.settle(state.cache)
        logits, states = out.logits[0], (getattr(out, "hidden_states", None) or (None,))[-1]
        # Older models do not know the key that says whose logits are wanted.
        places = range(len(at)) if len(logits) == max(len(at), 1) else at
        if len(logits) not in (max(len(at), 1), len(tokens)):
            raise UserError(
                f"{self.name}: expected logits of {len(tokens)} tokens, found {len(logits)}: use another model"
            )
        if states is None or states.shape[:2] != (1, len(tokens)):
            return [(logits[place],) for place in places]
        return [(logits[place], states[0, row]) for place, row in zip(places, at, strict=True)]


def _head(model: Any, name: str) -> Tensor:
    """The weight of a model's output head."""
    head = model.get_output_embeddings()
    if head is None:
        raise UserError(f"{name} has no head that gives logits of tokens: use another model")
    weight: Tensor = head.weight
    return weight


def adapt(path: Path, config: Any, device: torch.device, through: Through = FLOAT32) -> Adapter:
    """Loads the directory with transformers and the format's own library.

    Raises UserError where a library that the format needs is not installed, or the weights do not load.
    """
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method in ("specpress-ternary", "specpress-trellis"):
        import_module("runtime.formats.transformers")
    given: dict[str, Any] = {"dtype": getattr(torch, through.dtype)}
    if through.device_map is not None:
        if find_spec("accelerate") is None:
            raise UserError(
                f"{path.name}: device_map {through.device_map!r} needs accelerate, which is missing: pip install"
                " 'specpress[hf]'"
            )
        given["device_map"] = through.device_map
    with fault_of(path.name, "transformers cannot load it"):
        try:
            model, found = auto_class(config).from_pretrained(
                path, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **given
            )
        except ImportError as error:
            library = f"the library of {method or 'its format'}"
            raise UserError(f"{path.name}: transformers needs {library} to load it: {error}") from error
    if found["missing_keys"]:
        # transformers would go on with random numbers.
        raise UserError(
            f"{path.name}: transformers finds no tensor for {min(found['missing_keys'])}: restore the weights, or use "
            "another format"
        )
    if method == "bitsandbytes":
        # transformers gives the biases the asked type and leaves norms and tables the file's: layer norms take one.
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.is_meta:
                parameter.data = parameter.data.to(given["dtype"])
    return Adapter(model.eval() if through.device_map is not None else model.eval().to(device))
