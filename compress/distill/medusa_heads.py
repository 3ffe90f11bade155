"""Medusa heads as a module to train, and as files."""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from compress.files import write_atomic
from compress.training.task import Group
from runtime.checkpoints.medusa import DESCRIPTION, WEIGHTS, Description


class Head(nn.Module):
    """Residual blocks x + SiLU(W x + b), then a matrix: (hidden, hidden), or (V, hidden) of the head's own."""

    def __init__(self, layers: int, output: Tensor) -> None:
        super().__init__()
        size = output.shape[1]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size, size)) for _ in range(layers)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(layers)])
        self.output = nn.Parameter(output)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden) to (…, rows of the last matrix)."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = x + functional.silu(functional.linear(x, weight, bias))
        return functional.linear(x, self.output)


class MedusaHeads(nn.Module):
    """The heads of one target.

    table   (V, hidden): the target's output projection, which is not trained here. With `shared` it follows each head's
            square matrix; otherwise every head begins with a copy of its own.

    They begin as copies of the target's own head: the blocks as zeros, the square matrices as the identity.
    """

    def __init__(self, heads: int, layers: int, table: Tensor, shared: bool) -> None:
        super().__init__()
        self.layers, self.shared = layers, shared
        self.table: Tensor
        self.register_buffer("table", table.detach().float().clone(), persistent=False)
        start = torch.eye(table.shape[1]) if shared else self.table
        self.heads = nn.ModuleList([Head(layers, start.clone()) for _ in range(heads)])

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """For each head its logits (…, V) after the target's hidden states (…, hidden)."""
        found = [head(hidden) for head in self.heads]
        return [functional.linear(x, self.table) for x in found] if self.shared else found

    def groups(self, optimizer: str) -> list[Group]:
        """All parameters for the loop; `optimizer` of the matrices inside the heads."""
        named = dict(self.named_parameters())
        square = [
            parameter for name, parameter in named.items() if "weights" in name or (self.shared and "output" in name)
        ]
        biases = [parameter for name, parameter in named.items() if "biases" in name]
        groups = [
            Group("matrices", square, optimizer="muon" if optimizer == "muon" else "adamw"),
            Group("biases", biases, weight_decay=0.0),
        ]
        if not self.shared:
            groups.append(Group("projections", [p for name, p in named.items() if "output" in name]))
        return groups

    def describe(self, choices: tuple[tuple[int, ...], ...], target: str) -> Description:
        """The description of these heads with a tree, for the target of that digest."""
        size, (vocabulary, _) = len(self.heads), self.table.shape
        return Description(size, self.layers, self.table.shape[1], vocabulary, self.shared, choices, target)

    def save(self, out: Path, description: Description) -> None:
        """Writes medusa.json and medusa.safetensors (bfloat16); equal heads give equal bytes."""
        out.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for number, head in enumerate(self.heads):
            assert isinstance(head, Head)
            for layer, (weight, bias) in enumerate(zip(head.weights, head.biases, strict=True)):
                tensors[f"heads.{number}.layers.{layer}.weight"] = weight
                tensors[f"heads.{number}.layers.{layer}.bias"] = bias
            tensors[f"heads.{number}.{'mix' if self.shared else 'projection'}.weight"] = head.output
        stored = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in tensors.items()}
        write_atomic(out / WEIGHTS, save(stored, metadata={"format": "pt"}))
        write_atomic(out / DESCRIPTION, description.to_json().encode())
