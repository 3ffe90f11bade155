"""The Decoder contract over any other transformers causal LM.

transformers' kernels pick their order of operations by shape, so the lossless class is `measured`, not `exact`.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from runtime.contract import UNCALIBRATED, Cache, CacheKind, Out, Rows, SharesNothing
from runtime.errors import UserError, fault_of


@dataclass(frozen=True)
class Chain:
    """The rows `first` to `end` (exclusive) of a forward: the next tokens of one request."""

    request: int
    first: int
    end: int


def chains(rows: Rows, cache: Cache, refusal: str) -> Iterator[Chain]:
    """The requests' chains in the order of their rows, each checked when its turn comes.

    Raises UserError with the sentence `refusal` where a row follows another than the one before it, and ValueError for
    rows that do not go on where the cache ends.
    """
    request, parent, position = rows.request.tolist(), rows.parent.tolist(), rows.position.tolist()
    first = 0
    while first < len(request):
        end = first + 1
        while end < len(request) and request[end] == request[first]:
            end += 1
        if parent[first:end] != [-1, *range(first, end - 1)]:
            raise UserError(refusal)
        if position[first] != cache.length(request[first]):
            raise ValueError(f"row {first} is at position {position[first]}, the cache ends at another")
        yield Chain(request[first], first, end)
        first = end


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


class AdapterCache(SharesNothing):
    """One transformers cache per request."""

    def __init__(self, model: Any):
        self._model = model
        self._caches: dict[int, Any] = {}

    def open(self, capacity: int) -> int:
        """A handle; transformers' caches grow, so `capacity` reserves nothing."""
        from transformers import DynamicCache

        handle = next(i for i in range(len(self._caches) + 1) if i not in self._caches)
        self._caches[handle] = DynamicCache(config=self._model.config)
        return handle

    def close(self, request: int) -> None:
        """Frees the request's cache."""
        del self._caches[request]

    def fork(self, request: int) -> int:
        """A handle for a copy of the request's cache."""
        handle = next(i for i in range(len(self._caches) + 1) if i not in self._caches)
        self._caches[handle] = copy.deepcopy(self._caches[request])
        return handle

    def of(self, request: int) -> Any:
        """The transformers cache of a request."""
        return self._caches[request]

    def length(self, request: int) -> int:
        """Tokens stored."""
        return int(self._caches[request].get_seq_length())

    def truncate(self, request: int, length: int) -> None:
        """Drops all but the first `length` tokens. Raises UserError where this model's cache cannot roll back."""
        held = self.length(request)
        if not 0 <= length <= held:
            raise ValueError(f"cannot truncate {held} tokens to {length}")
        if length == held:
            return
        if length == 0:
            from transformers import DynamicCache

            self._caches[request] = DynamicCache(config=self._model.config)
            return
        try:
            self._caches[request].crop(length - held)
        except (NotImplementedError, AttributeError, ValueError, RuntimeError) as error:
            raise UserError(f"the cache of {type(self._model).__name__} cannot be rolled back: {error}") from error
        if self.length(request) != length:
            raise UserError(
                f"the cache of {type(self._model).__name__} cannot be rolled back; decode with --drafter none"
            )

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        """Keeps a prefix of a chain; other paths need a tree, which `forward` refuses here."""
        if list(path) != list(range(len(path))):
            raise ValueError("transformers' caches keep chains only")
        self.truncate(request, length + len(path))

    def bytes_per_token(self) -> int:
        """Keys and values over all layers, in the model's dtype."""
        config = self._model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * dim * self._model.dtype.itemsize


class Adapter:
    """A Decoder over a transformers model."""

    exact = False
    kernels = "transformers"
    kv = UNCALIBRATED

    def __init__(self, model: Any):
        self.model = model
        config = model.config
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.max_positions: int = getattr(config, "max_position_embeddings", 2048)
        self.device: torch.device = model.device

    @property
    def threads(self) -> int:
        """torch's, which transformers uses."""
        return torch.get_num_threads()

    def new_cache(self, kind: CacheKind = "float32", pages: int | None = None) -> AdapterCache:
        """An empty cache. Raises UserError for quantised and paged ones."""
        if kind != "float32" or pages is not None:
            raise UserError(
                f"{type(self.model).__name__} runs through transformers, whose caches are neither quantised nor paged"
                " here; leave out the kind of cache and the pages."
            )
        return AdapterCache(self.model)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        """See contract.Decoder. Raises UserError for trees: transformers' caches hold chains."""
        if not isinstance(cache, AdapterCache):
            raise TypeError(f"the adapter needs the cache of its new_cache(), not {type(cache).__name__}")
        wanted = range(len(tokens)) if logits_at is None else logits_at.tolist()
        logits: dict[int, Tensor] = {}
        hidden: dict[int, Tensor] = {}
        refusal = (
            f"{type(self.model).__name__} runs through transformers, which takes chains of tokens and no trees; choose"
            " another drafter than tree."
        )
        for chain in chains(rows, cache, refusal):
            first, end = chain.first, chain.end
            chosen = [i - first for i in wanted if first <= i < end]
            out = self.model(
                input_ids=tokens[first:end].view(1, -1).to(self.device),
                past_key_values=cache.of(chain.request),
                use_cache=True,
                output_hidden_states=True,
                logits_to_keep=torch.tensor(chosen or [0], device=self.device),
            )
            states = out.hidden_states[-1][0]
            for place, row in enumerate(chosen):
                logits[first + row] = out.logits[0, place].float()
                hidden[first + row] = states[row].float()
        if not len(wanted):
            return Out(torch.empty(0, self.vocab_size), torch.empty(0, self.hidden_size))
        return Out(torch.stack([logits[i] for i in wanted]), torch.stack([hidden[i] for i in wanted]))


def adapt(path: Path, config: Any, device: torch.device, through: Through = FLOAT32) -> Adapter:
    """Loads the directory with transformers and the format's own library.

    Raises UserError where a library that the format needs is not installed, or the weights do not load.
    """
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {"dtype": _DTYPES[through.dtype]}
    if through.device_map is not None:
        if find_spec("accelerate") is None:
            raise UserError(
                f"{path.name}: device_map {through.device_map!r} needs accelerate, which is missing: pip install"
                " 'specpress[hf]'"
            )
        given["device_map"] = through.device_map
    with fault_of(path.name, "transformers cannot load it"):
        try:
            model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, use_safetensors=True, **given)
        except ImportError as error:
            method = (getattr(config, "quantization_config", None) or {}).get("quant_method", "its format")
            raise UserError(f"{path.name}: transformers needs the library of {method} to load it: {error}") from error
    return Adapter(model.eval() if through.device_map is not None else model.eval().to(device))
