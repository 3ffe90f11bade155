"""What a `block/` directory holds: a description in JSON and the drafter's weights in safetensors.

block.json          the fields of Description, and `version`
block.safetensors   what `Description.shapes` says; speculative/drafters/block_network.py says what each one does
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoints.drafter_files import AGAIN, read_fields, read_tensors
from runtime.errors import UserError
from runtime.formats.schemes import SCHEMES

VERSION = 1
DESCRIPTION, WEIGHTS = "block.json", "block.safetensors"
# The matrices of a layer.
_LAYER = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True)
class Description:
    """A block drafter of one target.

    taps         which of the target's states it reads (contract.TakesStates), in the order in which it reads them.
    length       tokens on a path of its drafts, at most.
    layers       of the network; heads, kv_heads, head_dim and intermediate_size are theirs.
    window       tokens of the text before the last one that its attention sees.
    rank         numbers that are remembered along the drafted tokens.
    hidden_size, vocab_size   of the target.
    scheme       how its matrices are held when it runs, as recipes name it; "" as they are stored.
    head         how a copy of the target's output projection is held; "": the target's own is used, and no copy made.
    target       SHA-256 of the weights that it was trained on (drafter_files.weights_digest).
    frequent     tokens that the copy of the head has rows for; 0: the whole vocabulary.

    Raises ValueError for sizes below 1, heads that do not share keys evenly, more frequent tokens than there are, and
    an unknown scheme.
    """

    taps: tuple[int, ...]
    length: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    window: int
    rank: int
    hidden_size: int
    vocab_size: int
    scheme: str
    head: str
    target: str
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    frequent: int = 0

    def __post_init__(self) -> None:
        sizes = (self.length, self.layers, self.heads, self.kv_heads, self.head_dim, self.intermediate_size)
        if min(*sizes, self.window, self.rank, self.hidden_size, self.vocab_size, len(self.taps)) < 1:
            raise ValueError(f"taps and sizes must be at least 1, found {self}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"heads must share keys evenly, and their dimensions be even, found {self.heads} heads, "
                f"{self.kv_heads} of keys, {self.head_dim} dimensions"
            )
        if not 0 <= self.frequent <= self.vocab_size:
            raise ValueError(f"frequent must be from 0 to the vocabulary's {self.vocab_size}, found {self.frequent}")
        for scheme in (self.scheme, self.head):
            if scheme and scheme not in SCHEMES:
                raise ValueError(f"scheme {scheme!r} is unknown: expected one of {', '.join(SCHEMES)}")

    @property
    def logits(self) -> int:
        """Rows of the head that it reads."""
        return self.frequent or self.vocab_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the weights' file, and its shape."""
        hidden, rank = self.hidden_size, self.rank
        heads, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = self.intermediate_size
        found: dict[str, tuple[int, ...]] = {
            "tap_norms": (len(self.taps), hidden),
            "fuse": (hidden, len(self.taps) * hidden),
            "fuse_norm": (hidden,),
            "anchor": (hidden, hidden),
            "last": (hidden, hidden),
            "places": (self.length, hidden),
            "norm": (hidden,),
            "of_token": (2 * rank, hidden),
            "of_row": (2 * rank, hidden),
            "of_memory": (2 * rank, rank),
            "gates": (2 * rank,),
            "add": (hidden, rank),
            "sure": (hidden + rank + 2,),
        }
        if self.frequent:
            found["frequent"] = (self.frequent,)
        outer = ((heads, hidden), (keys, hidden), (keys, hidden), (hidden, heads))
        matrices = (*outer, (wide, hidden), (wide, hidden), (hidden, wide))
        for layer in range(self.layers):
            for name in ("attention_norm", "mlp_norm"):
                found[f"layers.{layer}.{name}"] = (hidden,)
            for name, shape in zip(_LAYER, matrices, strict=True):
                found[f"layers.{layer}.{name}"] = shape
        return found

    def to_json(self) -> str:
        """The text of block.json: equal descriptions give equal bytes."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2, sort_keys=True) + "\n"


def read_description(folder: Path) -> Description:
    """block.json of a directory. Raises UserError naming the file, and the key that is wrong."""
    data = read_fields(folder, DESCRIPTION, Description, VERSION, {"frequent": 0})
    shown = f"{folder.name}/{DESCRIPTION}"
    if not isinstance(data["taps"], list) or any(type(tap) is not int for tap in data["taps"]):
        raise UserError(f"{shown}: taps must be a list of whole numbers, found {data['taps']!r}; {AGAIN}")
    for key in ("norm_eps", "rope_theta"):
        if type(data[key]) not in (int, float) or not data[key] > 0:
            raise UserError(f"{shown}: {key} must be a number above 0, found {data[key]!r}; {AGAIN}")
    try:
        return Description(**data | {"taps": tuple(data["taps"])})
    except ValueError as error:
        raise UserError(f"{shown}: {error}; {AGAIN}") from error


def read_weights(folder: Path, description: Description) -> dict[str, Tensor]:
    """The tensors of block.safetensors, as stored.

    Raises UserError naming one that is missing or misshapen, and frequent tokens that are none or not in order.
    """
    found = read_tensors(folder, WEIGHTS, description.shapes(), DESCRIPTION)
    if (ids := found.get("frequent")) is not None:
        ordered = ids.dtype in (torch.int32, torch.int64) and bool((ids[1:] > ids[:-1]).all())
        if not ordered or int(ids[0]) < 0 or int(ids[-1]) >= description.vocab_size:
            raise UserError(
                f"{folder.name}/{WEIGHTS}: frequent must be whole numbers below {description.vocab_size}, each larger "
                f"than the one before; {AGAIN}"
            )
    return found
