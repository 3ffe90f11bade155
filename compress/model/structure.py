"""What a model consists of, told without its weights: transformers builds it on the meta device, in no memory.

Every architecture that transformers knows is described so. Code that comes with a checkpoint is never run.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from compress.errors import UserError
from compress.model import single_experts
from compress.model.names import Names
from runtime.errors import fault_of
from runtime.model.hf_classes import auto_class, decoder_path

Kind = Literal["linear", "conv1d", "router", "experts", "embedding", "norm", "head", "bias", "other"]

# Multi-token prediction (Qwen, MiMo, …), EAGLE and Medusa.
_DRAFT_HEAD = re.compile(r"(^|[._])(mtp|nextn|eagle\d?|medusa)(_\w+)?\.", re.IGNORECASE)
_ROUTERS = {"gate", "router", "shared_expert_gate"}


@dataclass(frozen=True)
class Parameter:
    """One parameter as transformers names it.

    shape          transformers' (a Conv1D is (inputs, outputs)).
    linear_router  whether it is the weight of a router that is an ordinary nn.Linear.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    linear_router: bool = False

    @property
    def module(self) -> str:
        """The module that the parameter belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is the weight of a module that quantised loaders replace unless they are told not to."""
        return self.kind in ("linear", "conv1d", "head") or self.linear_router


@dataclass(frozen=True, eq=False)
class ModelStructure:
    """A model of transformers on the meta device, and what is known of it without its weights: made once a run.

    config       transformers' object; model: its causal language model, in eval mode and float32.
    parameters   by name.
    blocks_at    module that holds the blocks ("model.layers").
    names        where the tensors of a checkpoint belong.
    tied         name -> the name whose tensor it shares.
    body_at      module that is the language model, where towers for images or sound stand beside it; else "".
    """

    config: Any
    model: Any
    parameters: dict[str, Parameter]
    blocks_at: str
    names: Names
    tied: dict[str, str]
    body_at: str = ""

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.model.get_submodule(self.blocks_at))

    @property
    def text_config(self) -> Any:
        """The language model's configuration, alone or inside of another."""
        return self.config.get_text_config(decoder=True)

    @property
    def body(self) -> Any:
        """The language model without its head, which takes tokens."""
        return self.model.get_submodule(self.body_at) if self.body_at else self.model.base_model

    @cached_property
    def buffers(self) -> frozenset[str]:
        """Tensors of floats that the model is stored with and that are no parameters."""
        held = self.model.state_dict()
        return frozenset(n for n, t in held.items() if n not in self.parameters and t.is_floating_point())

    def is_beside(self, tensor: str) -> bool:
        """Whether a checkpoint's tensor belongs to what stands beside the language model: towers, what joins them."""
        if not self.body_at:
            return False
        name = self.names.place(tensor).name
        parameter = self.parameters.get(name)
        return not name.startswith(f"{self.body_at}.") and (parameter is None or parameter.kind != "head")

    def carried(self, tensor: str) -> str | None:
        """Why a checkpoint's tensor is no recipe's to change, or None."""
        if self.is_beside(tensor):
            return "beside the language model: carried as it is"
        if self.is_draft_head(tensor):
            return "a draft head of the checkpoint, which transformers does not build: carried as it is"
        return None

    def find(self, tensor: str) -> Parameter | None:
        """The parameter that a checkpoint's tensor is, or None (a buffer, or part of a parameter fused on loading)."""
        place = self.names.place(tensor)
        return None if place.is_part else self.parameters.get(place.name)

    def block(self, tensor: str) -> int | None:
        """The number of the block that a checkpoint's tensor belongs to, or None."""
        number = self._number(tensor)
        return number if number is not None and number < self.count else None

    def is_draft_head(self, tensor: str) -> bool:
        """Whether a checkpoint's tensor is of a head that guesses further tokens, which transformers does not build:
        a block behind the last one (DeepSeek, GLM), or a module of that name."""
        place = self.names.place(tensor)
        if place.name in self.parameters:
            return False
        number = self._number(tensor)
        return (number is not None and number >= self.count) or _DRAFT_HEAD.search(tensor) is not None

    def _number(self, tensor: str) -> int | None:
        match = re.match(rf"{re.escape(self.blocks_at)}\.(\d+)\.", self.names.place(tensor).name)
        return int(match[1]) if match else None

    @cached_property
    def count(self) -> int:
        """Decoder layers."""
        return len(self.model.get_submodule(self.blocks_at))

    def check_renumbering(self, tensors: Iterable[str]) -> None:
        """Raises UserError where a checkpoint calls blocks otherwise than the model: no name says their number."""
        for tensor in tensors:
            number = self.block(tensor)
            if number is not None and not f".{self.blocks_at}".endswith("." + tensor.partition(f".{number}.")[0]):
                raise UserError(
                    f"tensor {tensor}: expected a name below {self.blocks_at} where whole blocks are to go, found "
                    "another: use a recipe that keeps all blocks"
                )

    def is_tied(self, tensor: str) -> bool:
        """Whether the tensor only repeats the one that it is tied to."""
        return self.names.place(tensor).name in self.tied

    def missing(self, tensors: list[str]) -> str | None:
        """The first parameter that no tensor of the checkpoint gives, or None.

        A parameter made of several tensors is there if any of them is.
        """
        found = {self.names.place(tensor).name for tensor in tensors}
        absent = (name for name in self.parameters if name not in found and self.tied.get(name, name) not in found)
        return next(absent, None)


def read_structure(folder: Path, apart: bool = False) -> ModelStructure:
    """The structure of the model that `folder`/config.json describes.

    apart  fused experts are built as quantised loaders have them (single_experts.py).

    Raises UserError where transformers cannot build a causal language model from it without foreign code.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = auto_class(config).from_config(config, trust_remote_code=False, dtype=torch.float32).eval()
            if apart:
                single_experts.take_apart(model.eval())
    except Exception as error:  # somebody else's file in a library that raises whatever its layers do
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{folder.name}/config.json: expected an architecture that transformers knows as a causal language model, "
            f"found one it cannot build ({reason}): use another model"
        ) from error
    parameters = dict(model.named_parameters(remove_duplicate=False))
    body_at = decoder_path(model)
    blocks_at = _blocks(model, body_at, getattr(config.get_text_config(decoder=True), "num_hidden_layers", None))
    if blocks_at is None:
        raise UserError(
            f"{folder.name}/config.json: expected a list of decoder layers, found none in a {type(model).__name__}: "
            "this architecture is not supported"
        )
    said = dict(getattr(model, "all_tied_weights_keys", None) or {})
    # Of two names that share a parameter, transformers says itself which one is stored.
    tied = {name: other for name, other in _shared(parameters).items() if name not in said.values()} | said
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    described = {}
    for name, parameter in parameters.items():
        module = modules[name.rpartition(".")[0]]
        kind: Kind = "head" if module is head and name.endswith(".weight") else _kind(name, parameter, module)
        linear_router = kind == "router" and isinstance(module, nn.Linear) and name.endswith(".weight")
        described[name] = Parameter(name, kind, tuple(parameter.shape), linear_router)
    return ModelStructure(config, model, described, blocks_at, Names(model), tied, body_at)


def _shared(parameters: dict[str, Any]) -> dict[str, str]:
    """Names of one and the same parameter: a module that several others share."""
    first: dict[int, str] = {}
    return {name: first[id(p)] for name, p in parameters.items() if first.setdefault(id(p), name) != name}


def _blocks(model: nn.Module, body_at: str, count: Any) -> str | None:
    """The largest list of `count` modules inside the language model that lies in no other list; else the largest list:
    some architectures count otherwise than they list."""
    inside = f"{body_at}." if body_at else ""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    lists = {name: module for name, module in lists.items() if name.startswith(inside)}
    for found in ({name: module for name, module in lists.items() if len(module) == count}, lists):
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in found.items()}
        outer = {n: size for n, size in sizes.items() if not any(n.startswith(f"{other}.") for other in sizes)}
        if outer:
            return max(outer, key=lambda name: outer[name])
    return None


def _kind(name: str, parameter: Any, module: Any) -> Kind:
    from transformers.pytorch_utils import Conv1D

    class_name, leaf = type(module).__name__, name.rpartition(".")[2]
    if "norm" in class_name.lower():
        return "norm"
    if not _ROUTERS.isdisjoint(name.split(".")[:-1]) or "router" in class_name.lower():
        return "router"
    if leaf == "bias":
        return "bias"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, Conv1D):
        return "conv1d"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.Conv1d):
        return "other"
    if parameter.ndim == 3 or "expert" in class_name.lower():
        return "experts"
    return "other"


def make_buffers(model: Any, module: nn.Module) -> None:
    """Gives a module of the meta device its own buffers: transformers computes them where it makes weights.

    The module's weights must still be on the meta device: elsewhere they would be made anew as well. Raises UserError
    where transformers cannot do so.
    """
    empty = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
    if not empty:
        return
    if any(not parameter.is_meta for parameter in module.parameters(recurse=False)):
        raise ValueError(f"{type(module).__name__}: buffers come before weights")
    for name, buffer in empty.items():
        module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    what = f"transformers cannot make the buffers of {type(module).__name__}; use a recipe that looks at no text"
    with torch.no_grad(), fault_of(type(model).__name__, what):
        model._init_weights(module)
