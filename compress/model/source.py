"""The models that go into a run: where they are, what they are called, whether they belong together."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifact import safetensors
from compress.artifact.files import sha256
from compress.errors import UserError
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.sampling.detokenize import read_tokenizer, require_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def default_pair() -> tuple[Path, Path]:
    """The target's and the draft's directory: in the installed package, else in the checkout's examples.

    Raises UserError where neither has them.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "_pair", package.parent / "examples" / "pair"):
        target, draft = folder / "target", folder / "draft"
        if (target / "config.json").is_file() and (draft / "config.json").is_file():
            return target, draft
    raise UserError("the embedded pair is not installed: name a model with --model")


NO_DRAFT = "none"
# Types that a plain matrix may have, as safetensors calls them.
_PLAIN = ("F64", "F32", "F16", "BF16")
# Of formats in which models are released: transformers' configuration that reads them as floats.
_DEQUANTIZED = {"mxfp4": "Mxfp4Config"}
_PIECES, _PIECE = 64, 1 << 16
_PAIR_NAMES = ("specpress-pair-target", "specpress-pair-draft")


@dataclass(frozen=True)
class Source:
    """A plain model directory. `name` is what reports call it: never an absolute path."""

    name: str
    checkpoint: Checkpoint

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return self.checkpoint.shards.files

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Raises UserError where the directory has none."""
        return read_tokenizer(self.path)

    @cached_property
    def max_positions(self) -> int:
        """Tokens that the model can hold."""
        config = self.checkpoint.config
        config = config.get("text_config") or config
        found = next((config[key] for key in ("max_position_embeddings", "n_positions") if config.get(key)), 2048)
        return int(found)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, from the files' headers."""
        return {name: self.checkpoint.shape(name) for name in self.checkpoint.names()}

    def item_sizes(self) -> dict[str, int]:
        """Bytes of one number of every tensor, from the files' headers."""
        return {name: safetensors.WIDTHS[self.checkpoint.shards.entry(name).dtype] for name in self.checkpoint.names()}

    def fingerprint(self) -> dict[str, Any]:
        """Enough to notice that the weights are others than before, without reading all of them."""
        files = {file.name: f"{file.stat().st_size} bytes, sample {_sampled(file)}" for file in self.weight_files}
        return {"name": self.name, "config": sha256(self.path / "config.json"), "files": files}


def _sampled(file: Path) -> str:
    """A digest of pieces spread over a file, its header and its end among them: training changes every piece."""
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for index in range(_PIECES):
            opened.seek(max(0, size - _PIECE) * index // (_PIECES - 1))
            digest.update(opened.read(_PIECE))
    return digest.hexdigest()[:16]


def open_sources(model: str | None, draft: str | None) -> tuple[Source, Source | None]:
    """The target and its draft, both checked.

    model   directory, run folder or hub name; None: the embedded pair's target, and its draft if none is named.
    draft   the same; None: no draft beside a named model; "none": no draft.

    Raises UserError for whatever is wrong with a directory, weights that are quantised already, and a draft with
    another vocabulary (naming the first token that differs).
    """
    pair = default_pair() if model is None else None
    target = _open(str(pair[0]), _PAIR_NAMES[0]) if pair is not None else _open(str(model))
    if draft is None and pair is not None:
        drafting = _open(str(pair[1]), _PAIR_NAMES[1])
    elif draft is None or draft == NO_DRAFT:
        return target, None
    else:
        drafting = _open(draft)
    require_same_vocabulary(target.tokenizer, drafting.tokenizer)
    return target, drafting


def _check_types(checkpoint: Checkpoint) -> None:
    """Raises UserError for a matrix of integers: nothing says what they stand for, and a run would find it late."""
    for name in checkpoint.names():
        entry = checkpoint.shards.entry(name)
        if name.endswith(".weight") and len(entry.shape) > 1 and entry.dtype not in _PLAIN:
            raise UserError(
                f"{checkpoint.path.name}: tensor {name} holds {entry.dtype}, expected {', '.join(_PLAIN)}: without a "
                "quantization_config in config.json nothing says what such numbers stand for; name the original"
            )


def _open(place: str, name: str | None = None) -> Source:
    checkpoint = open_checkpoint(place)
    if checkpoint.quantization is not None:
        method = checkpoint.quantization.get("quant_method", "some format")
        where = "" if checkpoint.path.is_file() else "/config.json"
        way = _DEQUANTIZED.get(method)
        copy = (
            ""
            if way is None
            else f", or a copy that transformers dequantises ({way}(dequantize=True), save_pretrained)"
        )
        raise UserError(
            f"{checkpoint.path.name}{where}: expected weights in full precision, found {method}: name the original"
            f"{copy}"
        )
    _check_types(checkpoint)
    # A directory goes by its own name, a model of the hub by its name there.
    found = checkpoint.path.resolve().name if Path(place).expanduser().is_dir() else place
    return Source(name or found, checkpoint)
