"""Where each row's keys lie: the tiles of one forward, worked out once and used by every layer."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.cache.contiguous import KeyValueCache
from runtime.cache.states import MOST
from runtime.cache.tree_rows import Trees
from runtime.checkpoints.architecture import Architecture
from runtime.contract import Cache, Rows
from runtime.errors import OutOfPages
from runtime.kernels.exact import TILE
from runtime.kv_store import KEY_BLOCK

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def checked_cache(
    tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None, architecture: Architecture
) -> KeyValueCache:
    """The cache, of the type that it must have. Where the rows stand in it is checked by slots.reserve.

    Raises TypeError for another kind of cache; ValueError for another model's, and as `require_tokens`.
    """
    if not isinstance(cache, KeyValueCache):
        raise TypeError(f"this decoder needs the cache of its new_cache(), not {type(cache).__name__}")
    require_tokens(tokens, len(rows), logits_at, architecture.vocab)
    if (found := cache.shape) != (expected := architecture.cache_shape):
        other, own = (
            ", ".join(f"{layers} layers of {heads} heads of {dim}" for layers, heads, dim in shape.groups)
            for shape in (found, expected)
        )
        raise ValueError(
            f"this cache is another model's: it has {other}, and this model {own}"
            + (f"; floats of states {found.state} and {expected.state}" if found.state != expected.state else "")
        )
    return cache


def require_tokens(tokens: Tensor, count: int, logits_at: Tensor | None, vocab: int) -> None:
    """Raises ValueError for tokens that are no integers (T,) in the vocabulary or not as many as the `count` rows, and
    for `logits_at` that are no integers (n,) in 0..T − 1."""
    # numel, not len: torch's len is Python.
    if tokens.numel() != count:
        raise ValueError(f"{tokens.numel()} tokens for {count} rows")
    _require_range("token ids", "tokens", tokens, vocab)
    if logits_at is not None:
        _require_range("logits_at", "logits_at", logits_at, count)


def _require_range(what: str, argument: str, values: Tensor, end: int) -> None:
    if values.ndim != 1 or values.dtype not in _INTEGERS:
        raise ValueError(f"{argument} must be integers (n,), found {values.dtype} {list(values.shape)}")
    # A list's extremes: for the few numbers of a decoding step several times quicker than numpy's or torch's.
    found = values.tolist()
    if found and (min(found) < 0 or max(found) >= end):
        raise ValueError(f"{what} must lie in 0..{end - 1}, found {min(found)}..{max(found)}")


@dataclass(slots=True)  # not frozen, which takes a microsecond a round
class Reserved:
    """Rows first..first+count of one request, which got the slots from `start`, its length before.

    parents  per row its parent's index among them, −1 for none; None where they are a chain.
    """

    request: int
    first: int
    count: int
    start: int
    parents: list[int] | None

    def before(self, row: int) -> int:
        """The slot of what row `row` of them follows; −1: it is the first of its text."""
        above = row - 1 if self.parents is None else self.parents[row]
        return self.start + above if above >= 0 else self.start - 1


@dataclass(frozen=True)
class Layout:
    """The rows of each request, and the tiles that attention runs on: up to TILE rows of a chain, or one of a tree.

    gather     (tiles, TILE) row index of each place; empty places repeat a row of their tile and are thrown away.
    positions  (tiles, TILE) last key that the place sees.
    scatter    (T,) flat place of each row.
    owner      whose rows each tile holds.
    path       per tile the slots that it sees, in the order of the positions on its path: of a chain None, its slots
               are its positions.
    """

    requests: list[Reserved]
    gather: Tensor
    positions: Tensor
    scatter: Tensor
    owner: list[Reserved]
    path: list[Tensor | None]


def plan(rows: Rows, cache: KeyValueCache) -> Layout:
    """Reserves slots for the rows and lays them out.

    Raises ValueError where a request's rows are not adjacent, a parent does not come before its child in the same
    request, or a row's position is not its parent's plus one; OutOfPages where a paged cache does not hold them.
    """
    return lay_out(rows, reserve(rows, cache))


def lay_out(rows: Rows, requests: list[Reserved]) -> Layout:
    """The tiles of rows that have their slots."""
    gather: list[list[int]] = []
    scatter = [0] * len(rows)
    owner: list[Reserved] = []
    path: list[Tensor | None] = []
    for request in requests:
        end, size = request.first + request.count, TILE if request.parents is None else 1
        tiles = range(request.first, end, size)
        if request.parents is None:
            path += [None] * len(tiles)
        else:
            # What came before the forward, then the row's ancestors and itself.
            before = torch.arange(request.start)
            path += [torch.cat((before, torch.tensor(branch) + request.start)) for branch in paths(request.parents)]
        for begin in tiles:
            members = list(range(begin, min(begin + size, end)))
            for place, row in enumerate(members):
                scatter[row] = len(gather) * TILE + place
            gather.append(members + [begin] * (TILE - len(members)))
            owner.append(request)
    places = torch.tensor(gather)
    return Layout(requests, places, rows.position[places], torch.tensor(scatter), owner, path)


def reserve(rows: Rows, cache: KeyValueCache, further: Sequence[int] | None = None) -> list[Reserved]:
    """Takes slots for the rows of each request, having checked all rows first: a refusal leaves the cache as it was.

    further  slots that each request, in order, takes besides, behind its rows, which then must be chains.
    Raises ValueError as `plan` says, and OutOfPages.
    """
    spans = rows.spans
    if isinstance(rows, Trees):
        out = _planned(rows.planned, cache)
    elif spans is None:
        out = _branches(rows, cache)
    else:
        out = _planned([(handle, start, count, None) for handle, start, count in spans], cache)
    if len(out) == 1 and further is None and not cache.format.state:
        # Nobody shares the forward: what the cache refuses by itself leaves nothing half done.
        cache.reserve(out[0].request, out[0].count)
        return out
    needs = {of.request: of.count for of in out}
    if len(needs) < len(out):
        twice = next(handle for handle in needs if sum(of.request == handle for of in out) > 1)
        raise ValueError(f"the rows of request {twice} are not adjacent")
    if further is not None:
        if len(further) != len(out):
            raise ValueError(f"{len(further)} numbers of further slots for {len(out)} requests")
        for of, more in zip(out, further, strict=True):
            if of.parents is not None:
                raise ValueError(f"the rows of request {of.request} are no chain")
            needs[of.request] += more
    for of in out:
        slots, capacity = needs[of.request], cache.capacity(of.request)
        if of.start + slots > capacity:
            raise ValueError(f"{of.start} + {slots} tokens do not fit a cache of {capacity}")
    if lacking := cache.missing_pages(needs):
        raise OutOfPages(lacking, KEY_BLOCK)
    for handle, slots in needs.items():
        cache.reserve(handle, slots)
    return out


def _planned(planned: Sequence[tuple[int, int, int, list[int] | None]], cache: KeyValueCache) -> list[Reserved]:
    """Where rows made of these spans and parents (contract.Trees) are to stand."""
    out: list[Reserved] = []
    first = 0
    for handle, start, count, parents in planned:
        if count == 0:
            continue
        if (length := cache.length(handle)) != start:
            raise ValueError(f"row {first} is at position {start}, its parent's successor is {length}")
        if parents is not None and (len(parents) != count or any(not -1 <= p < i for i, p in enumerate(parents))):
            raise ValueError(f"the rows from {first} on have parents {parents}, which are not earlier rows")
        out.append(Reserved(handle, first, count, start, parents))
        first += count
    return out


def _branches(rows: Rows, cache: KeyValueCache) -> list[Reserved]:
    """Where rows are to stand that are chains or trees, as their tensors say."""
    request, position, parent = rows.request.tolist(), rows.position.tolist(), rows.parent.tolist()
    out: list[Reserved] = []
    first = 0
    seen: set[int] = set()
    while first < len(request):
        handle = request[first]
        if handle in seen:
            raise ValueError(f"the rows of request {handle} are not adjacent")
        seen.add(handle)
        end = first
        while end < len(request) and request[end] == handle:
            end += 1
        length, count = cache.length(handle), end - first
        parents = None
        if position[first:end] != [*range(length, length + count)] or parent[first:end] != [-1, *range(first, end - 1)]:
            parents = _parents(position, parent, first, end, length)
        out.append(Reserved(handle, first, count, length, parents))
        first = end
    return out


def extend_states(
    reserved: Sequence[Reserved],
    tokens: Tensor,
    cache: KeyValueCache,
    logits_at: Tensor | None = None,
    further: Sequence[int] | None = None,
) -> None:
    """Makes room for the states after the rows, and after so many `further` slots whose tokens are not known yet.

    logits_at  the rows whose logits are asked for (None: all): they tell what is verified from what is only read.
    """
    if not cache.format.state:
        return
    asked = None if logits_at is None else set(logits_at.tolist())
    for number, of in enumerate(reserved):
        if (states := cache.states(of.request)) is not None:
            more, fed = 0, tokens[of.first : of.first + of.count].tolist()
            if further is None:
                wanted = _states_wanted(of, asked)
            else:
                more = further[number]
                wanted = min(1 + more, MOST)
            states.extend(fed + [0] * more, wanted)


def _states_wanted(of: Reserved, asked: set[int] | None) -> int:
    """How many of the last states these rows need: a draft's, and none behind a prompt's last row."""
    last = of.first + of.count - 1
    # The logits of a text's last token and of its draft are asked for, and those of no row of the prompt before it.
    verified = next((i for i in range(of.count) if asked is not None and last - i not in asked), of.count)
    if of.parents is None:
        # The logits of more rows are those of a text that is scored.
        return verified if verified <= MOST else 0
    branches = next(row for row, above in enumerate(of.parents) if above != row - 1)
    # A tree that a draft model grows asks for some of its rows alone, and any of its paths may be kept.
    wanted = min(verified, of.count - branches + MOST) if verified >= of.count - branches else of.count + 1
    # A row's parent is there until the row is read, however they lie.
    return max(wanted, *(row - above for row, above in enumerate(of.parents)))


def learn_drafts(reserved: Sequence[Reserved], drafted: Tensor, steps: Sequence[int], cache: KeyValueCache) -> None:
    """Tells states the tokens that `extend_states` did not know: drafted (requests, steps), without the last ones.

    Does not wait for the device on which they may lie.
    """
    for number, of in enumerate(reserved if cache.format.state else ()):
        if (states := cache.states(of.request)) is not None:
            states.learn(of.start + of.count, drafted[number, : steps[number] - 1])


def learn_rows(reserved: Sequence[Reserved], drafted: Tensor, places: Sequence[int], cache: KeyValueCache) -> None:
    """Tells states the tokens drafted (n,) of the rows `places`, in order and adjacent in each request."""
    for of in reserved if cache.format.state else ():
        begin, end = (bisect_left(places, row) for row in (of.first, of.first + of.count))
        if begin < end and (states := cache.states(of.request)) is not None:
            states.learn(of.start + places[begin] - of.first, drafted[begin:end])


def reserve_drafts(rows: Rows, cache: KeyValueCache, steps: Sequence[int], limit: int, vocab: int) -> list[Reserved]:
    """Takes slots for chains that then go on by themselves for so many steps, 1 or more each (GreedyChains).

    Raises ValueError as `reserve`, for other numbers of steps, and for a limit that is not in 1..vocabulary.
    """
    if not 1 <= limit <= vocab:
        raise ValueError(f"the limit must lie in 1..{vocab}, found {limit}")
    if min(steps, default=1) < 1:
        raise ValueError(f"every request needs 1 step or more, found {list(steps)}")
    # A request's last token is not fed, so it takes no slot.
    return reserve(rows, cache, [count - 1 for count in steps])


def _parents(position: list[int], parent: list[int], first: int, end: int, length: int) -> list[int] | None:
    """Parents of the rows first..end among themselves; None where they are a chain after all."""
    chain = True
    for row in range(first, end):
        above = parent[row]
        if above != -1 and not first <= above < row:
            raise ValueError(f"row {row} has parent {above}, which is not an earlier row of its request")
        expected = length if above == -1 else position[above] + 1
        if position[row] != expected:
            raise ValueError(f"row {row} is at position {position[row]}, its parent's successor is {expected}")
        chain = chain and above == (row - 1 if row > first else -1)
    return None if chain else [above - first if above >= 0 else -1 for above in parent[first:end]]


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Per row of a tree the rows from its root down to itself."""
    out: list[list[int]] = []
    for row, parent in enumerate(parents):
        out.append([*(out[parent] if parent >= 0 else []), row])
    return out


def keys_and_values(layout: Layout, cache: KeyValueCache, layer: int, tiles: range) -> tuple[Tensor, Tensor]:
    """Keys and values (tiles, blocks, kv_heads, KEY_BLOCK, d) of some tiles in logical order, equally many blocks."""
    keys, values = [], []
    read: dict[int, tuple[Tensor, Tensor]] = {}
    for tile in tiles:
        of, path = layout.owner[tile], layout.path[tile]
        if path is not None:
            k, v = cache.gather(layer, of.request, path)
        else:
            if of.request not in read:
                read[of.request] = cache.read(layer, of.request, of.start + of.count)
            needed = int(layout.positions[tile].max()) // KEY_BLOCK + 1
            k, v = (part[:needed] for part in read[of.request])
        keys.append(k)
        values.append(v)
    if len(keys) == 1:
        return keys[0].unsqueeze(0), values[0].unsqueeze(0)
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(keys, batch_first=True), pad(values, batch_first=True)
