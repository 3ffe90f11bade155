"""What keys and values may be held as: the bytes of each kind, and what it damages, measured on the original."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.best.space import CACHES, Option
from compress.errors import UserError
from compress.progress import Progress
from compress.report.quality import score_window
from compress.stages import kv_cache
from runtime.cache.states import bytes_of_states
from runtime.contract import CacheKind, CacheScheme

if TYPE_CHECKING:
    from runtime.model.load import Model

# Tokens that damage is measured on.
TOKENS = 2048


def kind_of(option: Option) -> CacheKind:
    """The kind of cache that an option of CACHES is."""
    return "float32" if option.keeps else option.scheme  # type: ignore[return-value]


def bytes_of(model: "Model", tokens: int, requests: int = 1) -> tuple[int, ...]:
    """What so many tokens of so many requests take in a cache of each of CACHES, with the states of layers."""
    states = requests * state_bytes(model)
    return tuple(model.decoder.new_cache(kind_of(option)).bytes_per_token() * tokens + states for option in CACHES)


def state_bytes(model: "Model") -> int:
    """What the states of one request take, where layers carry one."""
    architecture = getattr(model.decoder, "architecture", None)
    return 0 if architecture is None else bytes_of_states(sum(architecture.state_sizes))


def measure(original: "Model", windows: Tensor, threads: int | None, progress: Progress) -> tuple[float, ...]:
    """KL(original ‖ the same through a cache of each of CACHES), nats a token on average.

    windows  (S, T) int64 calibration tokens: all of them give the key factors, as a run has it, and the last few
             measure.

    Of the first alone where layers carry a state: key factors are measured where every layer attends. Raises UserError
    for keys, values or logits that are no finite numbers.
    """
    if state_bytes(original):
        return (0.0,)
    count = max(1, TOKENS // windows.shape[1])
    found = [0.0]
    for done, option in enumerate(CACHES[1:]):
        progress("caches", done, len(CACHES) - 1)
        scales = kv_cache.calibrate(original.path, kind_of(option), windows, threads)  # type: ignore[arg-type]
        decoder: Any = original.decoder
        factors = scales.key_factors(decoder.architecture)
        changed = type(decoder)(
            decoder.architecture, original.config, decoder.parts, decoder.kernel, CacheScheme(kind_of(option), factors)
        )
        scores = torch.cat(list(_divergences(decoder, changed, windows[-count:], kind_of(option))))
        found.append(max(0.0, float(scores.mean())))
    progress("caches", len(CACHES) - 1, len(CACHES) - 1)
    return tuple(found)


def _divergences(original: Any, changed: Any, windows: Tensor, kind: CacheKind) -> Iterator[Tensor]:
    for index, window in enumerate(windows):
        divergence = score_window(original, changed, window, index, kind).kl
        if not torch.isfinite(divergence).all():
            raise UserError(f"a cache of {kind}: expected finite logits through it, found others: check the weights")
        yield divergence
