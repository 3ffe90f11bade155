"""A checkpoint's tensors in another basis: computed when they are asked for, one block at a time."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from compress.errors import UserError
from compress.model.block import cast, stored_dtype
from compress.model.block_loader import BlockLoader
from compress.model.structure import ModelStructure, Parameter
from compress.quantize.folding import NORM_OFFSET, Fold
from compress.rotate.fold import Bases, check_sizes, layer_folds, rebase, rebase_rows, value_size
from compress.rotate.hadamard import Rotation
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.rotation import RotationRecord
from runtime.checkpoints.safetensors import Entry, Shards


def bases_of(record: RotationRecord, back: bool = False) -> Bases:
    """What a record's model is turned by; back: what undoes it. Raises UserError for sizes that no rotation has."""
    check_sizes(record.residual, record.values)
    return Bases(
        Rotation(record.residual, record.seed) if record.residual else None,
        Rotation(record.values, record.seed + 1) if record.values else None,
        back,
    )


def plan_rotation(
    checkpoint: Checkpoint, structure: ModelStructure, residual: bool, values: bool, seed: int
) -> RotationRecord:
    """What rotating a model comes to.

    Raises UserError for a model whose weights cannot be rotated: norms that are none of its root mean square or stand
    behind attention or the MLP, parts outside of the blocks that read or write the residual stream in a way that is not
    known, heads that guess further tokens (they read hidden states), sizes without a Hadamard matrix.
    """
    if structure.body_at:
        raise UserError(
            "rotate: expected a language model alone, found towers beside it, which write to the residual stream: "
            "leave the stage out"
        )
    _folds(BlockLoader(checkpoint, structure))
    hidden = int(structure.text_config.hidden_size) if residual else 0
    head_dim = value_size(structure.layers, str(structure.text_config.model_type)) if values else 0
    check_sizes(hidden, head_dim)
    if residual:
        _check_outside(checkpoint, structure)
    tied = any(structure.parameters[name].kind == "head" for name in structure.tied if name in structure.parameters)
    return RotationRecord(
        hidden, head_dim, seed, residual and tied and not _is_even(_final_norm(checkpoint, structure))
    )


def _folds(loader: BlockLoader) -> list[list[Fold]]:
    """Of every block, with experts apart."""
    names: dict[int, list[str]] = {}
    for name in loader.checkpoint.names():
        if (number := loader.structure.block(name)) is not None:
            names.setdefault(number, []).append(name)
    kind = str(loader.structure.text_config.model_type)
    return [layer_folds(loader.meta_block(number, names[number]).module, kind) for number in sorted(names)]


def _check_outside(checkpoint: Checkpoint, structure: ModelStructure) -> None:
    """Raises UserError unless there is one embedding, one norm and one head outside of the blocks, and nothing else."""
    draft = next((name for name in checkpoint.names() if structure.is_draft_head(name)), None)
    if draft is not None:
        raise UserError(
            f"tensor {draft}: it is of a head that guesses further tokens out of hidden states, which it would not "
            "know rotated: set residual: false in the stage rotate"
        )
    known = {"embedding": 1, "norm": 1, "head": 1, "bias": 1}
    for name, parameter in structure.parameters.items():
        if structure.block(name) is None:
            known[parameter.kind] = known.get(parameter.kind, 0) - 1
            if known[parameter.kind] < 0:
                raise UserError(
                    f"tensor {name}: expected one embedding, one norm and one head outside of the blocks of a model "
                    "that is rotated, found more: set residual: false in the stage rotate"
                )


def _final_norm(checkpoint: Checkpoint, structure: ModelStructure) -> Tensor:
    """What the last norm multiplies by, (hidden,) float64."""
    name = next(n for n in checkpoint.names() if structure.block(n) is None and _kind(structure, n) == "norm")
    return checkpoint.tensor(name).double() + NORM_OFFSET[str(structure.text_config.model_type)]


def _kind(structure: ModelStructure, tensor: str) -> str:
    parameter = structure.find(tensor)
    return "" if parameter is None else parameter.kind


def _is_even(weights: Tensor) -> bool:
    """Whether a norm multiplies all channels alike, which every rotation passes."""
    return bool((weights == weights[0]).all())


class RebasedShards(Shards):
    """A plain model's tensors in another basis, in the types that they have.

    checkpoint, structure  of the model as it is: with back, the rotated one.
    norms    with back: the norms' weights as they were, by their tensors' names.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        structure: ModelStructure,
        record: RotationRecord,
        norms: Mapping[str, Tensor] | None = None,
        back: bool = False,
    ):
        self.directory, self.files = checkpoint.shards.directory, checkpoint.shards.files
        self._checkpoint, self._structure, self._norms = checkpoint, structure, norms or {}
        self._bases, self._kind = bases_of(record, back), str(structure.text_config.model_type)
        self._offset = NORM_OFFSET[self._kind]
        self._loader = BlockLoader(checkpoint, structure)
        self._folds = _folds(self._loader)
        outside = {_kind(structure, n): n for n in checkpoint.names() if structure.block(n) is None}
        self._norm, self._embedding = outside["norm"], outside["embedding"]
        self._head = next((n for n, p in structure.parameters.items() if p.kind == "head"), "")
        self._entries: dict[str, Entry] = {n: checkpoint.shards.entry(n) for n in checkpoint.names()}
        # A file may hold a copy of a tied head.
        for name in [name for name in self._entries if structure.is_tied(name)]:
            del self._entries[name]
        if record.untied and back:
            self._entries.pop(self._head, None)
        elif record.untied:
            self._entries[self._head] = self._entries[self._embedding]
        # A norm whose weights are all the same may stay, and does where the head has to stay the embedding.
        self._norm_stays = not back and structure.is_tied(self._head) and not record.untied
        self._block: tuple[int, dict[str, Tensor]] = (-1, {})

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """All tensors: each one outside of the blocks, and each block's."""
        of_blocks: dict[int, list[str]] = {}
        for name in sorted(self._entries):
            number = self._structure.block(name)
            if number is None:
                yield {name: self[name]}
            else:
                of_blocks.setdefault(number, []).append(name)
        for number in sorted(of_blocks):
            yield {name: self[name] for name in of_blocks[number]}

    def original_norms(self) -> dict[str, Tensor]:
        """Weights of all norms that are folded, as the checkpoint has them, by their tensors' names."""
        if self._bases.residual is None:
            return {}
        found = {self._norm: self._checkpoint.tensor(self._norm)}
        for name in self._entries:
            number = self._structure.block(name)
            if number is not None and self._path(name, number) in self._before(number):
                found[name] = self._checkpoint.tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __getitem__(self, name: str) -> Tensor:
        self.entry(name)
        number = self._structure.block(name)
        if number is None:
            return self._outside(name)
        if self._block[0] != number:
            self._block = (number, self._load(number))
        return self._block[1][name]

    def _before(self, number: int) -> set[str]:
        """Paths, in block `number`, of the norms that are folded."""
        return {fold.previous for fold in self._folds[number] if "norm" in fold.previous}

    def _path(self, name: str, number: int) -> str:
        parameter = self._structure.find(name)
        place = "" if parameter is None else parameter.module
        return place.removeprefix(f"{self._structure.blocks_at}.{number}.")

    def _load(self, number: int) -> dict[str, Tensor]:
        names = [name for name in self._checkpoint.names() if self._structure.block(name) == number]
        block = self._loader.load(number, names)
        own = {name: tensor for name, tensor in self._norms.items() if self._structure.block(name) == number}
        norms = {self._path(name, number): tensor.double() + self._offset for name, tensor in own.items()}
        rebase(layer_folds(block.module, self._kind), block.module, self._bases, norms)
        return self._loader.stored(block, names)[0]

    def _outside(self, name: str) -> Tensor:
        """A tensor outside of the blocks; the last norm goes into the head."""
        source = self._embedding if name == self._head and self._structure.is_tied(name) else name
        tensor, bases = self._checkpoint.tensor(source), self._bases
        if bases.residual is None:
            return tensor
        dtype, kind = stored_dtype(self._checkpoint, source), self._role(name)
        if kind == "embedding":
            return cast(bases.stream(tensor), dtype, name)
        if kind in ("norm", "head") and self._norm_stays:
            return tensor if kind == "norm" else cast(bases.stream(tensor), dtype, name)
        wanted = self._norms.get(self._norm)
        if kind == "norm":
            ones = torch.ones_like(tensor, dtype=torch.float64) - self._offset
            return cast(ones, dtype, name) if wanted is None else wanted
        if kind == "head":
            before = self._checkpoint.tensor(self._norm).double() + self._offset
            after = None if wanted is None else wanted.double() + self._offset
            return cast(rebase_rows(tensor, before, bases, after), dtype, name)
        return tensor

    def _role(self, name: str) -> str:
        if name == self._head:
            return "head"
        parameter: Parameter | None = self._structure.find(name)
        return "" if parameter is None else parameter.kind
