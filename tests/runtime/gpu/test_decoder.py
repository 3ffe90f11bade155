"""The decoder on Triton's kernels: the reference's logits, and the same bits at every width."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime import load
from runtime.gpu.decoder import TritonDecoder
from runtime.kv import CacheKind
from runtime.rows import Rows, integers

Tiny = Callable[..., Path]
Text = Callable[..., Tensor]
KINDS: tuple[CacheKind, ...] = ("float32", "float16", "int8", "int4")
PACKED = ("int8", "int4", "nf4", "ternary", "int8 static", "mixed")


def decoder(path: Path, device: str, **options: bool) -> TritonDecoder:
    made = load(path, device=device, kernels="triton", **options).decoder
    assert isinstance(made, TritonDecoder)
    return made


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.cpu() - b).norm() / b.norm())


def prefill(made: TritonDecoder, tokens: Tensor, kind: CacheKind = "float32") -> Tensor:
    cache = made.new_cache(kind)
    return made.forward(tokens, Rows.chains([(cache.open(len(tokens)), 0, len(tokens))]), cache).logits


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "mixtral"])
def test_logits_are_the_references(tiny: Tiny, text: Text, device: str, kind: str) -> None:
    tokens = text(20)
    want = prefill_reference(tiny(kind), tokens)
    assert relative(prefill(decoder(tiny(kind), device), tokens), want) < 1e-5


def prefill_reference(path: Path, tokens: Tensor, kind: CacheKind = "float32") -> Tensor:
    made = load(path, kernels="reference").decoder
    cache = made.new_cache(kind)
    return made.forward(tokens, Rows.chains([(cache.open(len(tokens)), 0, len(tokens))]), cache).logits
