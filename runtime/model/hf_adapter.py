"""The Decoder contract over any other transformers causal LM."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.errors import UserError, fault_of
from runtime.model.chains import ChainDecoder

_DTYPES = ("float32", "bfloat16", "float16")
# With transformers' cache these give other logits than without one, or break off.
_WITHOUT_CACHE = ("cpmant", "prophetnet", "recurrent_gemma")
# Of these several tokens on top of a state begin it anew.
_ONE_BY_ONE = ("falcon_mamba", "jamba", "mamba")


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


@dataclass
class State:
    """A request's cache (where the model takes none, its tokens), and how many: recurrent states cannot count them."""

    cache: Any
    tokens: int = 0


class Adapter(ChainDecoder):
    """A Decoder over a transformers model."""

    kernels = "transformers"

    def __init__(self, model: Any):
        self.model = model
        config = model.config
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = max(getattr(config, "max_position_embeddings", 2048), 0) or 2048  # XLNet's: −1
        self.device: torch.device = model.device
        takes = [name for name in ("past_key_values", "cache_params") if name in signature(model.forward).parameters]
        # Other arguments are ignored without a word: such a model reads all of a text again at each forward.
        serves = model._supports_default_dynamic_cache() and config.model_type not in _WITHOUT_CACHE
        self.cache_name = takes[0] if takes and serves else None
        through = f"{type(model).__name__} runs through transformers"
        self.no_kinds = (
            f"{through}, whose caches are neither quantised nor paged here; leave out the kind of cache and the pages."
        )
        self.no_trees = f"{through}, which takes chains of tokens and no trees; choose another drafter than tree."

    @property
    def threads(self) -> int:
        """torch's, which transformers uses."""
        return torch.get_num_threads()

    def empty(self) -> State:
        from transformers import DynamicCache

        return State(DynamicCache(config=self.model.config) if self.cache_name else torch.empty(0, dtype=torch.int64))

    def length(self, state: State) -> int:
        return state.tokens

    def cut(self, state: State, length: int) -> State:
        """See ChainDecoder. Raises UserError where this model's cache cannot roll back."""
        if length == 0:
            return self.empty()
        if self.cache_name is None:
            return State(state.cache[:length], length)
        why = f"the cache of {type(self.model).__name__} cannot be rolled back"
        try:
            state.cache.crop(length - state.tokens)
            left = state.cache.get_seq_length()
        except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
            raise UserError(f"{why}: {error}") from error
        if left != length:
            raise UserError(f"{why}; decode with --drafter none")
        return State(state.cache, length)

    def bytes_per_token(self) -> int:
        """Keys and values over all layers, in the model's dtype."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 0)
        if not heads or self.cache_name is None:
            return 0  # states that do not grow, or tokens alone
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * dim * self.model.dtype.itemsize

    def run(self, tokens: Tensor, state: State, at: Sequence[int]) -> list[tuple[Tensor, ...]]:
        if state.tokens and len(tokens) > 1 and self.model.config.model_type in _ONE_BY_ONE:
            steps = [self.run(token, state, [0] if row in at else []) for row, token in enumerate(tokens.split(1))]
            return [found for step in steps for found in step]
        name = type(self.model).__name__
        held: dict[str, Any] = {self.cache_name: state.cache, "use_cache": True} if self.cache_name else {}
        if not held:
            at = [state.tokens + row for row in at]
            state.cache = tokens = torch.cat([state.cache, tokens.cpu()])
            state.tokens = 0
        try:
            out = self.model(
                input_ids=tokens.view(1, -1).to(self.device),
                output_hidden_states=True,
                logits_to_keep=torch.tensor(at or [0], device=self.device),
                **held,
            )
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, RuntimeError) and self.device.type != "cpu":
                raise  # what the device says is explained elsewhere
            raise UserError(f"{name} does not run token by token on transformers' cache that grows: {error}") from error
        state.tokens += len(tokens)
        logits, states = out.logits[0], (out.hidden_states or (None,))[-1]
        # Older models do not know the key that says whose logits are wanted.
        places = range(len(at)) if len(logits) == max(len(at), 1) else at
        if len(logits) not in (max(len(at), 1), len(tokens)):
            raise UserError(f"{name}: expected logits of {len(tokens)} tokens, found {len(logits)}: use another model")
        if states is None or states.shape[:2] != (1, len(tokens)):
            return [(logits[place],) for place in places]
        return [(logits[place], states[0, row]) for place, row in zip(places, at, strict=True)]


def adapt(path: Path, config: Any, device: torch.device, through: Through = FLOAT32) -> Adapter:
    """Loads the directory with transformers and the format's own library.

    Raises UserError where a library that the format needs is not installed, or the weights do not load.
    """
    from transformers import AutoModelForCausalLM

    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
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
            model, found = AutoModelForCausalLM.from_pretrained(
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
