"""What a `medusa/` directory holds: a description in JSON and the heads' weights in safetensors.

medusa.json          the fields of Description, and `version`
medusa.safetensors   heads.K.layers.L.weight (hidden, hidden) and heads.K.layers.L.bias (hidden) of the residual
                     blocks; then heads.K.mix.weight (hidden, hidden) before the target's own output projection,
                     or heads.K.projection.weight (vocabulary, hidden) in its place
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from runtime.checkpoints.drafter_files import AGAIN, read_fields, read_tensors
from runtime.errors import UserError

VERSION = 1
DESCRIPTION, WEIGHTS = "medusa.json", "medusa.safetensors"
Choice = tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """Medusa heads (Cai et al. 2024, 2401.10774) and the tree that they draft.

    heads        head k = 0, 1, … predicts the token k + 2 places after the one whose hidden state it reads: the target
                 itself predicts the next one.
    layers       residual blocks x + SiLU(W x + b) of each head.
    hidden_size, vocab_size   of the target.
    shared       whether the target's own output projection follows, after a square matrix of each head's own, rather
                 than an output projection of each head's own.
    choices      the tree, as paths of ranks: (0, 1) is the second choice of head 1 after the first choice of head 0.
                 The first n of them are the tree of n nodes.
    target       SHA-256 of the weights that the heads were trained on (drafter_files.weights_digest).

    Raises ValueError for numbers below 1, and where the choices are no tree of these heads: a parent or a sibling of
    lower rank is missing, or comes later.
    """

    heads: int
    layers: int
    hidden_size: int
    vocab_size: int
    shared: bool
    choices: tuple[Choice, ...]
    target: str

    def __post_init__(self) -> None:
        if min(self.heads, self.layers, self.hidden_size, self.vocab_size) < 1:
            raise ValueError(f"heads, layers and sizes must be at least 1, found {self}")
        if not self.choices:
            raise ValueError("a tree needs at least one choice, found none")
        known: set[Choice] = {()}
        for choice in self.choices:
            if not 1 <= len(choice) <= self.heads or not 0 <= choice[-1] < self.vocab_size or choice in known:
                raise ValueError(f"the choice {list(choice)} stands there twice, or is none of {self.heads} heads")
            parent, rank = choice[:-1], choice[-1]
            if parent not in known or (rank > 0 and (*parent, rank - 1) not in known):
                raise ValueError(f"the choice {list(choice)} comes before its parent or a sibling of lower rank")
            known.add(choice)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the weights' file, and its shape."""
        found: dict[str, tuple[int, ...]] = {}
        square = (self.hidden_size, self.hidden_size)
        for head in range(self.heads):
            for layer in range(self.layers):
                found[f"heads.{head}.layers.{layer}.weight"] = square
                found[f"heads.{head}.layers.{layer}.bias"] = (self.hidden_size,)
            if self.shared:
                found[f"heads.{head}.mix.weight"] = square
            else:
                found[f"heads.{head}.projection.weight"] = (self.vocab_size, self.hidden_size)
        return found

    def to_json(self) -> str:
        """The text of medusa.json: equal descriptions give equal bytes."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2, sort_keys=True) + "\n"


def read_description(folder: Path) -> Description:
    """medusa.json of a directory. Raises UserError naming the file, and the key that is wrong."""
    data = read_fields(folder, DESCRIPTION, Description, VERSION)
    shown, choices = f"{folder.name}/{DESCRIPTION}", data["choices"]
    if not isinstance(choices, list) or not all(isinstance(path, list) for path in choices):
        raise UserError(f"{shown}: choices must be a list of lists of ranks; {AGAIN}")
    if any(type(rank) is not int for path in choices for rank in path):
        raise UserError(f"{shown}: choices must hold whole numbers; {AGAIN}")
    try:
        return Description(**data | {"choices": tuple(tuple(path) for path in choices)})
    except (TypeError, ValueError) as error:
        raise UserError(f"{shown}: {error}; {AGAIN}") from error


def read_weights(folder: Path, description: Description) -> dict[str, Tensor]:
    """The tensors of medusa.safetensors, as stored. Raises UserError naming one that is missing or misshapen."""
    return read_tensors(folder, WEIGHTS, description.shapes(), DESCRIPTION)
