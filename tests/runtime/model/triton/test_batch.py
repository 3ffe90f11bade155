"""The block of inputs: its shape is that of a bucket, and rows that fill it up touch nobody's memory."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cache.quantizer import CacheFormat
from runtime.cache.slots import Reserved, paths, reserve
from runtime.contract import Rows, integers
from runtime.model.triton.batch import ALIGNMENT, NOWHERE, WIDTHS, Inputs, Staging, bucket_for, depth_of, fill
from runtime.model.triton.cache import GpuCache


@given(rows=st.integers(1, 700), requests=st.integers(1, 700), keys=st.integers(1, 40_000), depth=st.integers(0, 70))
def test_buckets_hold_what_they_are_for(rows: int, requests: int, keys: int, depth: int) -> None:
    requests = min(rows, requests)
    bucket = bucket_for(rows, requests, keys, depth)
    assert rows <= bucket.rows and keys <= 64 * bucket.blocks and depth <= bucket.tail
    assert bucket.captured == (rows <= WIDTHS[-1])
    # Rows that fill it up have a request of their own.
    assert requests < bucket.requests or (requests == bucket.requests and rows == bucket.rows)
    assert all(begin % ALIGNMENT == 0 for _, begin, _, _ in bucket.places)
    # Few shapes: a bucket is its own bucket.
    assert bucket_for(bucket.rows, requests, 64 * bucket.blocks, bucket.tail).words == bucket.words


def test_paths_and_depths_of_trees() -> None:
    assert paths([-1, 0, 0, 2, -1]) == [[0], [0, 1], [0, 2], [0, 2, 3], [4]]
    assert depth_of([Reserved(0, 0, 3, 9, None)]) == 0
    assert depth_of([Reserved(0, 0, 3, 9, None), Reserved(1, 3, 5, 0, [-1, 0, 0, 2, -1])]) == 3


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_a_block_says_where_the_rows_stand(data: st.DataObject) -> None:
    cache = GpuCache(CacheFormat(1, 1, 8, torch.device("cpu")))
    counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    before = [data.draw(st.integers(0, 150)) for _ in counts]
    handles = [cache.open(200) for _ in counts]
    for handle, length in zip(handles, before, strict=True):
        cache.reserve(handle, length)
    request, position, parent = [], [], []
    for handle, count, length in zip(handles, counts, before, strict=True):
        base, depth = len(request), []
        for row in range(count):
            above = data.draw(st.integers(-1, row - 1))
            depth.append(0 if above < 0 else depth[above] + 1)
            request.append(handle)
            position.append(length + depth[-1])
            parent.append(above if above < 0 else base + above)
    reserved = reserve(Rows(integers(request), integers(position), integers(parent)), cache)
    rows = len(request)
    bucket = bucket_for(rows, len(counts), 200, depth_of(reserved))
    staging = Staging(torch.device("cpu"))
    fill(bucket, staging.take(bucket.words), np.arange(rows, dtype=np.int32) + 5, reserved, cache)
    block = torch.empty(bucket.words, dtype=torch.int32)
    staging.send(block)
    found = Inputs(**bucket.cut(block))
    assert found.token[:rows].tolist() == list(range(5, 5 + rows))
    assert found.position.tolist() == position + [NOWHERE] * (bucket.rows - rows)
    scratch = cache.scratch
    assert (found.slot[rows:] == 64 * scratch).all() and (found.request[rows:] == bucket.requests - 1).all()
    for row in range(rows):
        table = found.table[found.request[row]].tolist()
        held = cache.table(request[row])
        assert table[: len(held)] == list(held) and min(table) >= 0 and max(table) <= scratch
        # A row's last key is its own, wherever the others of its path lie.
        last = position[row]
        start = int(found.start[row])
        slot = last if last < start else int(found.tail[row, last - start])
        assert table[slot // 64] * 64 + slot % 64 == int(found.slot[row])
