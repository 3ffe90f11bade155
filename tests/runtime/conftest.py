"""A model whose logits are a hash of the last tokens, with a real cache: exact by construction, and quick.

And what the tests of the native kernels share: the paths that run here, random packed weights, packed tiny models.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import formats, native
from runtime.contract import UNCALIBRATED, Cache, CacheScheme, Decoder, Out, Rows
from runtime.formats import int4, int8, three_of_four, trellis
from runtime.formats.packed import PackedWeight, Scheme, Tiles
from runtime.formats.schemes import KINDS

VOCABULARY = 320
Context = tuple[int, ...]


@dataclass
class ListCache:
    """The tokens themselves, per request, in slots. `broken` lets a token it drops take the place of the last one."""

    broken: bool = False
    slots: dict[int, list[int]] = field(default_factory=dict)
    capacity: dict[int, int] = field(default_factory=dict)
    pages: int = 0
    pages_free: int = 0

    def open(self, capacity: int) -> int:
        handle = next(i for i in range(len(self.slots) + 1) if i not in self.slots)
        self.slots[handle] = []
        self.capacity[handle] = capacity
        return handle

    def fork(self, request: int) -> int:
        handle = self.open(self.capacity[request])
        self.slots[handle] = list(self.slots[request])
        return handle

    def close(self, request: int) -> None:
        del self.slots[request], self.capacity[request]

    def match_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> int:
        return 0

    def cache_prefix(self, request: int, tokens: Sequence[int], salt: str = "") -> None:
        assert self.broken or list(tokens) == self.slots[request][: len(tokens)]

    def piece_end(self, request: int, end: int, length: int) -> int:
        return end

    def missing_pages(self, needs: Mapping[int, int]) -> int:
        return 0

    def length(self, request: int) -> int:
        return len(self.slots[request])

    def truncate(self, request: int, length: int) -> None:
        assert 0 <= length <= self.length(request)
        slots = self.slots[request]
        dropped = slots[length:]
        del slots[length:]
        if self.broken and slots and dropped:
            slots[-1] = dropped[0]

    def keep(self, request: int, length: int, path: Sequence[int]) -> None:
        slots = self.slots[request]
        self.slots[request] = slots[:length] + [slots[length + step] for step in path]

    def bytes_per_token(self) -> int:
        return 8


@dataclass
class HashDecoder:
    """logits = `law` of the last three tokens. Counts its forwards; `broken` goes to its caches."""

    law: Callable[[Context], np.ndarray]
    max_positions: int = 4096
    broken: bool = False
    vocab_size: int = VOCABULARY
    hidden_size: int = 4
    exact: bool = True
    kv: CacheScheme = UNCALIBRATED
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    caches: list[ListCache] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def new_cache(self, kind: str = "float32", pages: int | None = None, states: str = "float32") -> ListCache:
        self.caches.append(ListCache(self.broken))
        return self.caches[-1]

    def forward(self, tokens: Tensor, rows: Rows, cache: Cache, logits_at: Tensor | None = None) -> Out:
        assert isinstance(cache, ListCache)
        self.widths.append(len(tokens))
        ids, handles = tokens.tolist(), rows.request.tolist()
        before = {handle: list(cache.slots[handle]) for handle in handles}
        paths: list[list[int]] = []
        for i, (token, handle, position, parent) in enumerate(
            zip(ids, handles, rows.position.tolist(), rows.parent.tolist(), strict=True)
        ):
            assert parent < i and (parent < 0 or handles[parent] == handle)
            path = [*(before[handle] if parent < 0 else paths[parent]), token]
            assert self.broken or position == len(path) - 1 < self.max_positions
            paths.append(path)
            cache.slots[handle].append(token)
            assert self.broken or cache.length(handle) <= cache.capacity[handle]
        at = range(len(ids)) if logits_at is None else logits_at.tolist()
        logits = [self.law(tuple(paths[i][-3:])) for i in at]
        stacked = torch.tensor(np.array(logits), dtype=torch.float32).view(len(logits), self.vocab_size)
        return Out(stacked, torch.tensor([[float(len(paths[i]))] * self.hidden_size for i in at]))


@dataclass
class FakeModel:
    """What `runtime.load` returns, as far as the loop looks at it. No token ends a text unless a test says so."""

    decoder: Any
    tokenizer: Any
    end_tokens: frozenset[int] = frozenset([10**9])
    path: Path = Path("fake")
    draft_path: Path | None = None
    medusa_path: Path | None = None


def _hashed(seed: int, context: Context) -> np.ndarray:
    key = seed
    for token in context:
        key = (key * 1_000_003 + token + 1) % 2**61
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(VOCABULARY)


@pytest.fixture(scope="session")
def tokenizer(tiny: Callable[..., Path]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny("llama"))


@pytest.fixture
def fake(tokenizer: Any) -> Callable[..., FakeModel]:
    """fake(seed, noise=0.0, …): `noise` mixes in another hash, as a draft is a noisy copy of its target."""

    def make(seed: int = 0, noise: float = 0.0, end_tokens: Sequence[int] = (10**9,), **options: Any) -> FakeModel:
        def law(context: Context) -> np.ndarray:
            return 3 * _hashed(seed, context) + noise * _hashed(seed + 1000, context)

        return FakeModel(HashDecoder(law, **options), tokenizer, frozenset(end_tokens))

    return make


@pytest.fixture
def constant(tokenizer: Any) -> Callable[[np.ndarray], FakeModel]:
    """A model whose next-token distribution is always the given one, over the ids 0, 1, …"""

    def make(distribution: np.ndarray) -> FakeModel:
        logits = np.full(VOCABULARY, -np.inf)
        with np.errstate(divide="ignore"):
            logits[: len(distribution)] = np.log(distribution)
        return FakeModel(HashDecoder(lambda context: logits), tokenizer)

    return make


@pytest.fixture(scope="session")
def chi_squared() -> Callable[[np.ndarray, np.ndarray], float]:
    """(observed counts, expected probabilities) to the p-value; bins that expect fewer than 5 are joined.

    0.0 where something impossible was observed.
    """
    from scipy import stats

    def test(observed: np.ndarray, probabilities: np.ndarray) -> float:
        observed, expected = observed.ravel(), probabilities.ravel() * observed.sum()
        if observed[expected == 0].any():
            return 0.0
        large = expected >= 5
        counts, wanted = observed[large], expected[large]
        if (rest := expected[~large].sum()) > 0:
            counts, wanted = np.append(counts, observed[~large].sum()), np.append(wanted, rest)
        if len(wanted) == 1:
            return 1.0
        return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)

    return test


PATHS = [name for name in native.PATHS if native.usable(name)[0]]
_SKIPPED = pytest.param("", marks=pytest.mark.skip(reason=native.usable("portable")[1]))


@pytest.fixture(scope="session", params=PATHS or [_SKIPPED])
def native_path(request: pytest.FixtureRequest) -> str:
    """Each instruction path of the native kernels that runs on this machine."""
    return str(request.param)


@pytest.fixture(scope="session", params=["plain-torch", *(PATHS[:1] or [_SKIPPED])])
def kernels(request: pytest.FixtureRequest) -> str:
    """Plain torch, and what `auto` takes here. The reference, which is slow, has the decoder of the one and the other's
    bits."""
    return str(request.param)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """`load(threads=…)` sets torch's threads for the whole process: puts them back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed_weight(
    kind: str,
    n: int,
    k: int,
    group: int = 0,
    *,
    bits: int | None = None,
    unsigned: bool = False,
    offset: bool = False,
    perm: bool = False,
    bias: bool = False,
    static: bool = False,
    planes: bool = False,
    seed: int = 0,
) -> PackedWeight:
    """Random codes over all that the kind allows, random scales and whatever else is asked.

    int4 counts from 0 (`unsigned`), or is signed and of 4, 3 or 2 `bits`, int6 of 6 or 5. nf4 and mxfp4: of 16 levels.
    """
    g = torch.Generator().manual_seed(seed)
    if kind == "trellis":
        return _trellis_weight(n, k, bits or 3, bias, g)
    if kind == "ternary-1.25":
        return _fours_weight(n, k, bias, g)
    bits = bits or {"int8": 8, "int6": 6, "ternary": 2}.get(kind, 4)
    half = 1 << bits - 1
    int4 = (0, 16) if unsigned else (-half, half)
    low, high = {"int8": (-128, 128), "int6": int4, "int4": int4, "ternary": (-1, 2)}.get(kind, (0, 16))
    codes = torch.randint(low, high, (n, k), generator=g).to(torch.int8)
    scale = torch.rand(n, -(-k // group) if group else 1, generator=g) * 0.02 + 0.001
    activation = "int8-tensor" if static else "int8-group" if group else "int8-token"
    zeros = torch.randint(*(int4 if kind in ("int4", "int6") else (0, 16)), scale.shape, generator=g)
    return PackedWeight(
        Scheme(kind, bits, group, not offset, activation),  # type: ignore[arg-type]
        codes,
        scale,
        offset=scale * zeros if offset else None,
        perm=torch.randperm(k, generator=g) if perm else None,
        bias=torch.randn(n, generator=g) if bias else None,
        input_scale=torch.tensor(0.02) if static else None,
        planes=planes,
    )


def _trellis_weight(n: int, k: int, bits: int, bias: bool, g: torch.Generator) -> PackedWeight:
    """Random sequences, whose outputs and inputs beyond the layer are random, too."""
    tiles = torch.randint(0, 256, trellis.empty_tiles(n, k, bits).shape, generator=g, dtype=torch.uint8)
    levels = torch.randint(-127, 128, (128,), generator=g).to(torch.int8)
    return PackedWeight(
        trellis.scheme(bits),
        trellis.decode(tiles, levels, bits, (n, k)),
        torch.rand(n, 1, generator=g) * 0.02 + 0.001,
        bias=torch.randn(n, generator=g) if bias else None,
        tiles=Tiles(tiles, levels),
    )


def _fours_weight(n: int, k: int, bias: bool, g: torch.Generator) -> PackedWeight:
    """Random patterns; of a last four that is cut short the 0 may be beyond the end."""
    patterns = torch.randint(0, 32, (n, -(-k // 4)), generator=g, dtype=torch.uint8)
    return PackedWeight(
        three_of_four.scheme(),
        three_of_four.decode(patterns, k),
        torch.rand(n, 1, generator=g) * 0.02 + 0.001,
        bias=torch.randn(n, generator=g) if bias else None,
    )


@pytest.fixture(scope="session")
def packed() -> Callable[..., PackedWeight]:
    """packed("int4", n, k, group, offset=True, …) is a random packed weight (`packed_weight`)."""
    return packed_weight


@pytest.fixture(scope="session")
def tiny_packed(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_packed("nf4") is the tiny llama with its linear layers packed, as an ordinary model directory.

    The kinds are those of `pack_as`; a second argument names another model, and others change it as `tiny` takes them.
    """
    made: dict[str, Path] = {}

    def get(kind: str, model: str = "llama", **changes: Any) -> Path:
        key = f"{kind}-{model}-{sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("packed") / kind
            _pack(tiny(model, **changes), made[key], kind)
        return made[key]

    return get


_MIXED = {
    "q_proj": "int4 order",
    "k_proj": "int3 zero points",
    "v_proj": "int8 static",
    "o_proj": "int2 order",
    "gate_proj": "int4 rows zero points",
    "up_proj": "int3",
    "down_proj": "int2",
}


def pack_as(kind: str, prefix: str, weight: Tensor) -> PackedWeight:
    """A weight packed by round to nearest.

    Beside the formats' own names: "int4 zero points"; "int4 order" with an input order of each layer's own; "int4
    rows", "int3 …" and "int2 …" likewise; "int8 static" with an input scale of each layer's own; "mixed" with these
    side by side in every block.
    """
    if kind == "mixed":
        return pack_as(_MIXED[prefix.rsplit(".", 1)[1]], prefix, weight)
    g = torch.Generator().manual_seed(sum(prefix.encode()))
    if kind == "int8 static":
        return int8.pack(weight, input_scale=torch.rand(1, generator=g) * 0.02 + 0.02)
    if not kind.startswith("int") or kind == "int8":
        return KINDS[kind].format.pack(weight)
    bits, size = int(kind[3]), 0 if "rows" in kind else 32
    symmetric = "zero points" not in kind and "order" not in kind
    perm = torch.randperm(weight.shape[1], generator=g) if "order" in kind else None
    packed = int4.pack(weight if perm is None else weight[:, perm], size, bits=bits, symmetric=symmetric)
    return replace(packed, perm=perm)


def _pack(source: Path, out: Path, kind: str) -> None:
    shutil.copytree(source, out)
    written, schemes, reordered = {}, {}, []
    for name, tensor in load_file(source / "model.safetensors").items():
        # Mixtral's experts are of w1, w2 and w3.
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            prefix = name.removesuffix(".weight")
            packed = pack_as(kind, prefix, tensor)
            written |= formats.to_tensors(packed, prefix, torch.float32)
            schemes[prefix] = packed.scheme
            if packed.perm is not None:
                reordered.append(prefix)
        else:
            written[name] = tensor
    save_file(written, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = formats.hf_config(schemes, ["lm_head"], reordered=reordered)
    (out / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def text() -> Callable[..., Tensor]:
    """text(count, seed) is (count,) random token ids of the tiny models."""

    def get(count: int, seed: int = 0) -> Tensor:
        return torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))

    return get


@pytest.fixture(scope="session")
def whole() -> Callable[..., Tensor]:
    """whole(decoder, tokens) are the logits of one forward over an empty cache; `kind` is the cache's."""

    def run(decoder: Decoder, tokens: Tensor, kind: str = "float32") -> Tensor:
        cache = decoder.new_cache(kind) if kind != "float32" else decoder.new_cache()  # type: ignore[call-arg]
        return decoder.forward(tokens, Rows.chains([(cache.open(len(tokens)), 0, len(tokens))]), cache).logits

    return run
