"""The safetensors files of a model directory as one lazy mapping of tensors; nothing outside the directory is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from runtime.errors import UserError
from runtime.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SMALL = 1 << 21  # elements
_TOGETHER = 1 << 26  # bytes
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def inside(directory: Path, name: str, said_by: str) -> Path:
    """The file `name` of a model directory, which must lie in it, links resolved.

    A hub snapshot links into the `blobs` beside it, which is allowed. Raises UserError for absolute names, names with
    "..", links that lead elsewhere, and missing files; `said_by` names the file that asked.
    """
    shown = f"{directory.name}/{said_by}"
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\\" in name or Path(name).is_absolute():
        raise UserError(f"{shown}: the file name {name!r} leaves the directory; only files inside it are read")
    root = directory.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    path = directory / name
    try:
        stays, is_file = path.resolve().is_relative_to(root), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long, a NUL or half a character in it, or a link to itself.
        raise UserError(f"{shown}: {name[:80]!r} cannot be the name of a file ({type(error).__name__})") from error
    if not stays:
        raise UserError(f"{shown}: {name} is a link that leaves the directory; replace it by the file itself")
    if not is_file:
        raise UserError(f"{shown}: the file {name} is missing; fetch the model again, or copy the file there")
    return path


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, and what its file's header says of it (dtype as safetensors spells it: "BF16")."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class _Open:
    """Files that stay open for their small tensors: opening one reads its whole header, 60 ms for a mixture whose
    experts are 28,000 tensors. They are let go, with the pages that were touched, after `_TOGETHER` bytes."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}
        self._given = 0

    def copy(self, path: Path, name: str) -> Tensor:
        from safetensors import safe_open

        if self._given > _TOGETHER:
            self._files, self._given = {}, 0
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = safe_open(path, framework="pt")
        tensor: Tensor = file.get_tensor(name).clone()
        self._given += tensor.nbytes
        return tensor


class Shards(Mapping[str, Tensor]):
    """Tensors by name. Headers are read when it is made, a tensor's bytes when it is asked for.

    A large tensor is a mapping of its file of its own, which goes with it, so that walking a model holds one block of
    it, not every page that was ever touched. Small ones are copied out of files that stay open for a while.
    """

    def __init__(self, directory: Path, file: str | None = None):
        """The weights; or one other `file` of the directory, which config.json names.

        Raises UserError for a missing, truncated or foreign file, or a tensor that the index promises in vain.
        """
        self.directory = directory
        places = _weight_map(directory) if file is None else {}
        said_by = "config.json" if file else INDEX if places else SINGLE
        names = sorted(set(places.values())) or [file or SINGLE]
        self.files: tuple[Path, ...] = tuple(inside(directory, name, said_by) for name in names)
        entries = {name: entry for file in self.files for name, entry in header(file).items()}
        for name, file in places.items():
            if name not in entries or entries[name].file != directory / file:
                raise UserError(f"{directory.name}/{file}: tensor {name} is missing, though {INDEX} places it there")
        self._entries = {name: entries[name] for name in sorted(places or entries)}

    @cached_property
    def _open(self) -> _Open:
        return _Open()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """File, dtype and shape of a tensor. Raises UserError where there is none."""
        if name not in self._entries:
            held = f"{self.directory.name}/{self.files[0].name if len(self.files) == 1 else INDEX}"
            why = "the checkpoint is incomplete or of another architecture"
            raise UserError(f"{held}: tensor {name} is missing; {why}")
        return self._entries[name]

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        entry = self.entry(name)
        try:
            if prod(entry.shape) <= _SMALL:
                return self._open.copy(entry.file, name)
            with safe_open(entry.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            shown = f"{self.directory.name}/{entry.file.name}"
            raise UserError(f"{shown}: tensor {name} cannot be read ({error}); fetch the file again") from error
        return tensor


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name → file name; empty for a checkpoint of one file."""
    if (directory / INDEX).exists():
        names = read_json(inside(directory, INDEX, INDEX)).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
            raise UserError(f"{directory.name}/{INDEX}: weight_map must map tensor names to file names")
        for file in names.values():
            if not file.endswith(".safetensors"):
                raise UserError(f"{directory.name}/{INDEX}: {file!r} is no .safetensors file, and nothing else is read")
        return names
    if (directory / SINGLE).exists():
        return {}
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise UserError(
            f"{directory.name} holds only pickled weights ({pickles[0]}), and loading a pickle runs its code; convert a"
            " copy that you trust: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)"
        )
    neither = f"neither {SINGLE} nor {INDEX} is there"
    raise UserError(f"{directory.name}: {neither}; give a directory with safetensors weights")


def header(path: Path) -> dict[str, Entry]:
    """The tensors of one file. Raises UserError for one that is cut short or no safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: Entry(path, piece.get_dtype(), tuple(piece.get_shape()))
                for name in file.keys()  # noqa: SIM118 (not a mapping)
                for piece in [file.get_slice(name)]
            }
    except (SafetensorError, OSError, ValueError) as error:
        shown = f"{path.parent.name}/{path.name}"
        raise UserError(f"{shown} is truncated or no safetensors file ({error}); fetch it again") from error
