"""Slots that native code moves are those that torch moves."""

import pytest
import torch

from runtime.cache import quantizer
from runtime.cache.quantizer import CacheFormat
from runtime.contract import CacheKind
from runtime.kv_store import Store, allocate
from runtime.native.binding import library


def filled(form: CacheFormat) -> Store:
    store = allocate(form.kind, form.layers, 3, form.kv_heads, form.head_dim, form.device, form.value_dim)
    draws = torch.Generator().manual_seed(1)
    for part in store.parts:
        part.copy_(torch.randint(-100, 100, part.shape, generator=draws).to(part.dtype))
    return store


@pytest.mark.skipif(library()[0] is None, reason="no native kernels")
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("values", [0, 24])
def test_slots_are_moved_as_torch_does(kind: CacheKind, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a slot is read and written: all are read first."""
    form = CacheFormat(2, 3, 20, torch.device("cpu"), kind, value_dim=values)
    source, target = torch.tensor([70, 64, 3, 130]), torch.tensor([64, 63, 70, 5])
    known, native, plain = filled(form), filled(form), filled(form)
    form.move(native, source, target)
    with monkeypatch.context() as patched:
        patched.setattr(quantizer, "library", lambda: (None, "left out"))
        form.move(plain, source, target)
    for before, a, b in zip(known.parts, native.parts, plain.parts, strict=True):
        assert torch.equal(a, b) and (before.numel() == 0 or not torch.equal(a, before))
