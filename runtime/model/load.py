"""`load`: a model directory, a run folder, a GGUF file or a hub name becomes a decoder with its tokenizer."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from runtime.checkpoints import model_config
from runtime.checkpoints.architecture import (
    Architecture,
    configuration,
    describe,
    in_towers,
    language_model,
    transformers_configuration,
)
from runtime.checkpoints.open import open_checkpoint
from runtime.checkpoints.safetensors import inside
from runtime.contract import Decoder
from runtime.devices import explaining, keep_to_share, resolve, use_threads
from runtime.errors import UserError
from runtime.files import read_json
from runtime.kernels.dispatch import choose
from runtime.model.build import build
from runtime.model.onnx import graph
from runtime.model.rotary import STATIC_TYPES, for_context, rope_types
from runtime.model.triton.cache import free_bytes, needed, require_room
from runtime.model.unread import Noted, warn_of_unread
from runtime.sampling.detokenize import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from runtime.model.hf_adapter import Through


@dataclass(frozen=True)
class Model:
    """A decoder, the directory or GGUF file it came from, and (read at first use) its tokenizer."""

    decoder: Decoder
    path: Path
    config: Any

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The directory's or file's tokenizer. Raises UserError where it has none."""
        if self.path.is_file():
            from runtime.checkpoints.gguf.tokenizer import read_tokenizer as read_from_gguf

            return read_from_gguf(self.path)
        return read_tokenizer(self.path)

    @property
    def draft_path(self) -> Path | None:
        """The run's draft, where the directory is the `model/` of a run folder that has one."""
        draft = self.path.parent / "draft"
        return draft if self.path.name == "model" and (draft / "config.json").is_file() else None

    @property
    def medusa_path(self) -> Path | None:
        """The run's Medusa heads, where the directory is the `model/` of a run folder that has them."""
        heads = self.path.parent / "medusa"
        return heads if self.path.name == "model" and (heads / "medusa.json").is_file() else None

    @property
    def block_path(self) -> Path | None:
        """The run's block drafter, where the directory is the `model/` of a run folder that has one."""
        block = self.path.parent / "block"
        return block if self.path.name == "model" and (block / "block.json").is_file() else None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Ids that end a text, from generation_config.json, else config.json. Raises UserError for what are no ids."""
        found, name = None, "generation_config.json"
        if (self.path / name).is_file():
            said = read_json(inside(self.path, name, name))
            model_config.check_generation(said, f"{self.path.name}/{name}")
            found = said.get("eos_token_id")
        if found is None:
            found = getattr(self.config, "eos_token_id", None)
        return frozenset() if found is None else frozenset(found if isinstance(found, list) else [found])


def own_architecture(config: Any, context: int | None = None) -> Architecture | None:
    """The architecture of a configuration, where our own decoder runs it; None where transformers has to.

    Of a composite that of its language model, as if it were alone. context: see `load`.
    """
    config = language_model(config)
    found = describe(vars(config) if isinstance(config, SimpleNamespace) else config.to_dict())
    if found is None or not rope_types(config) <= set(STATIC_TYPES):
        return None
    positions = for_context(config, context)[1]
    return found if positions is None else replace(found, max_positions=min(found.max_positions, positions))


def load(
    path: str | Path,
    device: str = "cpu",
    threads: int | None = None,
    kernels: str = "auto",
    adapter: "bool | Through" = False,
    planes: bool = False,
    context: int | None = None,
) -> Model:
    """Loads a checkpoint or artifact: packed weights stay packed, everything runs in float32 beside them.

    path     a model directory, a run folder, a GGUF file, a directory with a model.onnx (an export), or a hub name.
    device   "cpu", "cuda", "cuda:N" or "auto" (CUDA where there is one).
    threads  of the native kernels (None: physical cores) and, for the whole process, torch's (None: as they are, but no
             more than a container's share).
    kernels  "auto", or the name of one set of kernels (kernels.available says which run here, and why).
    adapter  run through transformers even where the decoder knows the architecture; a `Through` (hf_adapter.py) says in
             which type it computes, and whether it is spread over devices.
    context  tokens that texts may come to have, prompt and answer, where long ones are rotated otherwise (LongRoPE):
             all are rotated as such long ones are. None: as short ones are, and have no more positions than those.
    planes   lay int8 weights out so that the `nested` drafter can run on their upper four bits; results stay the same.

    Raises UserError for anything wrong with the directory, the device or the architecture.
    """
    where = resolve(device)
    if threads is None:
        keep_to_share()
    else:
        use_threads(threads)
    if graph.holds(folder := Path(path).expanduser()):
        from runtime.model.onnx.decoder import open_decoder

        if planes or adapter or kernels != "auto":
            raise UserError(
                f"{folder.name}/{graph.GRAPH} runs on ONNX Runtime: leave out planes, the adapter and the kernels"
            )
        decoder, values = open_decoder(folder, where, threads)
        return Model(decoder, folder, values)
    checkpoint = open_checkpoint(path)
    config = configuration(checkpoint)
    architecture = own_architecture(config, context)
    if architecture is not None and language_model(config) is not config:
        architecture = in_towers(architecture, checkpoint)
    if adapter or architecture is None:
        from runtime.model.hf_adapter import FLOAT32, adapt

        if checkpoint.path.is_file():
            raise UserError(
                f"{checkpoint.path.name}: only Specpress' own decoder runs a GGUF file, and it does not run this one as"
                " asked; give the original model directory"
            )
        if planes:
            raise UserError(
                f"{checkpoint.path.name}: transformers runs this model, and `nested` needs Specpress' own kernels;"
                " choose another drafter"
            )
        config = transformers_configuration(checkpoint)
        with explaining():
            adapted = adapt(checkpoint.path, config, where, FLOAT32 if isinstance(adapter, bool) else adapter)
        return Model(adapted, checkpoint.path, config)
    kernel = choose(kernels, str(where), threads)
    if where.type == "cuda":
        size = checkpoint.path.stat().st_size if checkpoint.path.is_file() else checkpoint.bytes_on_disk()
        require_room(checkpoint.path.name, needed(architecture, size), free_bytes(where))
    with explaining():
        settled, positions = for_context(language_model(config), context)
        noted = None if checkpoint.path.is_file() else Noted(checkpoint.shards)
        read_from = checkpoint if noted is None else replace(checkpoint, shards=noted)
        made = build(read_from, architecture, settled, kernel, where, planes)
    if noted is not None:
        warn_of_unread(checkpoint.path.name, noted, architecture)
    if positions is not None:
        made.beyond = " It rotates longer texts otherwise (LongRoPE): load it with --context for those."
    return Model(made, checkpoint.path, config)
