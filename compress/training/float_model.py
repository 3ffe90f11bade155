"""Plain models in float32, in and out of training: read, measured, written with the tensors their checkpoint had."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.model import directory
from compress.model.block import cast, stored_dtype
from compress.model.structure import ModelStructure, read_structure
from compress.training.contract import Group
from compress.training.data import portions
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint


def load(folder: Path, device: str = "cpu") -> Any:
    """A transformers causal language model in float32. Code that comes with a checkpoint is never run."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return model.eval().to(device)


@dataclass(frozen=True)
class Student:
    """A plain model that is trained, and the directory that it was read from."""

    model: Any
    checkpoint: Checkpoint
    structure: ModelStructure

    @classmethod
    def load(cls, folder: Path, device: str) -> "Student":
        return cls(load(folder, device), open_checkpoint(folder), read_structure(folder))

    def freeze_fused(self) -> list[str]:
        """Stops training of parameters that the checkpoint has no tensor for (fused experts); their names."""
        found = {parameter.name for name in self.checkpoint.names() if (parameter := self.structure.find(name))}
        frozen = [name for name, _ in self.model.named_parameters() if name not in found]
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        return frozen

    def block_matrices(self) -> set[str]:
        """Names of the weights of the blocks' linear layers."""
        known = self.structure.parameters
        return {
            name
            for name, parameter in self.model.named_parameters()
            if self.structure.block(name) is not None and parameter.dim() == 2 and known[name].is_linear
        }

    def write(self, out: Path, shard_bytes: int) -> None:
        """Writes `out`: the directory with the model's weights, by the names and in the types that it has there.

        Raises UserError for a weight that is not finite or that its type cannot hold.
        """
        parameters = dict(self.model.named_parameters())

        def stored(name: str) -> Tensor:
            found = self.structure.find(name)
            trained = parameters.get(found.name) if found is not None else None
            if trained is None:
                return self.checkpoint.tensor(name)
            return cast(trained.detach().cpu(), stored_dtype(self.checkpoint, name), name)

        names = (name for name in self.checkpoint.names() if not self.structure.is_tied(name))
        directory.write_model(({name: stored(name)} for name in names), self.checkpoint.path, out, shard_bytes)


@torch.no_grad()
def held_out_loss(model: Any, windows: Tensor, autocast: bool = False) -> float:
    """Mean cross entropy in nats of all predicted tokens of windows (E, length) int64."""
    model.eval()
    device = next(model.parameters()).device
    losses = []
    for rows in portions(windows):
        tokens = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens, use_cache=False).logits
        found = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
        losses.append(float(found))
    return math.fsum(losses) / (windows.shape[0] * (windows.shape[1] - 1))


def perplexities(**losses: float) -> dict[str, float]:
    """Perplexity of each loss in nats."""
    return {name: math.exp(loss) for name, loss in losses.items()}


class ModelTask:
    """What tasks on a whole transformers model have in common (`compress.training.contract.Task`).

    held_out  (E, length) int64: windows to evaluate on.
    autocast  whether evaluation, too, computes in bfloat16.
    blocks    names of the blocks' matrices, which have an `optimizer` of their own.
    """

    blocks: Collection[str] = ()
    optimizer: Literal["adamw", "muon"] = "adamw"

    def __init__(self, model: Any, held_out: Tensor, autocast: bool) -> None:
        self.model, self.held_out, self.autocast = model, held_out, autocast

    def groups(self) -> list[Group]:
        """The blocks' matrices, the other matrices, and norms and biases, which have no weight decay."""
        wanted = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        inside = [p for name, p in wanted if name in self.blocks]
        others = [p for name, p in wanted if name not in self.blocks]
        groups = [
            Group("blocks", inside, optimizer=self.optimizer),
            Group("outside", [p for p in others if p.dim() >= 2]),
            Group("norms and biases", [p for p in others if p.dim() < 2], weight_decay=0.0),
        ]
        return [group for group in groups if group.parameters]

    def evaluate(self) -> float:
        """Mean cross entropy of the held-out windows, nats."""
        return held_out_loss(self.model, self.held_out, self.autocast)

    def state(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(state[name])
