"""What the benchmarks share: a captured call keeps the memory that its graph reads."""

import gc
import weakref
from functools import partial

import torch

from runtime.bench.measure import find


def test_a_replay_holds_what_its_graph_reads(device: str) -> None:
    """A graph has addresses alone: without the call its tensors would be freed, and it would read what is not there."""
    place = find(device)
    x, out = (torch.full((5,), value, device=place.device) for value in (2.0, 0.0))
    held = weakref.ref(x)
    replay = place.repeated(partial(torch.add, x, 3.0, out=out))
    del x
    gc.collect()
    assert held() is not None
    replay()
    assert out.tolist() == [5.0] * 5
    del replay
    gc.collect()
    assert held() is None
