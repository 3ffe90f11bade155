"""What a change of a layer's weights does to the model's output, told by gradients: a few forwards for all layers.

KL(original ‖ changed) of a window's output is, for a small change E of a layer's weights, the mean of ½ ⟨G, E⟩²: G is
the gradient of the log probability of tokens drawn from the model itself (its Fisher information; FIT, 2210.08502,
ranks layers so). Errors of weights are taken to be independent of one another: of the square of a sum the sum of
squares is left, ½ Σ G² E², and all that must be known of E is how large each weight's own error is. Some of a layer's
outputs stand for all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.progress import Progress

# Outputs of a layer that stand for all.
_ROWS = 32


@dataclass
class Gradients:
    """Of a layer's weights (N, K), each summed over the tokens of a window.

    rows     (R,) int64: the outputs that are looked at.
    windows  of each window (R, K).
    energy   (N,) of each output: squares of what it adds to the log probability.
    """

    rows: Tensor
    windows: list[Tensor] = field(default_factory=list)
    energy: Tensor | float = 0.0

    def add(self, inputs: Tensor, back: Tensor) -> None:
        """Takes one window: inputs (T, K), and the gradient of the outputs (T, N)."""
        self.windows.append(back[:, self.rows].T @ inputs)
        self.energy = self.energy + back.square().sum(dim=0)

    @property
    def squares(self) -> Tensor:
        """(R, K): the sum over windows of G²."""
        return torch.stack(self.windows).square().sum(dim=0)

    def lost(self, weight: Tensor, errors: Tensor, squares: Tensor) -> float:
        """The divergence, summed over windows, that changes of a whole weight (N, K) make, nats.

        errors   (R, K): squared changes of the outputs that are looked at.
        squares  (R, K): the sum over windows of what each counts.
        """
        # What all outputs lose, of what some lose.
        shares = weight.square().sum(dim=1) * self.energy
        more = float(shares.sum() / shares[self.rows].sum().clamp(min=1e-30))
        return 0.5 * more * float((errors * squares).sum())


def collect(model: Any, windows: Tensor, layers: Mapping[str, nn.Module], progress: Progress) -> dict[str, Gradients]:
    """The gradients of linear layers, by name; layers that have no part in the output are missing.

    model     a transformers causal LM in float32, in eval mode; its parameters ask for no gradients afterwards.
    windows   (S, T) int64 tokens.
    progress  told ("gradients", windows done, windows).

    Raises UserError where logits are not finite, or a layer's outputs take no part in gradients (named).
    """
    model.requires_grad_(False)
    drawn = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), _hooked(model, layers) as found:
        for done, window in enumerate(windows.split(1)):
            progress("gradients", done, len(windows))
            likely = model(window, use_cache=False).logits[0].log_softmax(dim=-1)
            if not bool(torch.isfinite(likely).all()):
                raise UserError("expected finite logits of the original model, found others: check its weights")
            tokens = torch.multinomial(likely.detach().exp(), 1, generator=drawn)
            likely.gather(1, tokens).sum().backward()
    progress("gradients", len(windows), len(windows))
    # What runs and comes to nothing (a head that only training looks at) has no windows.
    return {name: one for name, one in found.items() if one.windows}


def check_finite(unit: str, damages: Iterable[float]) -> None:
    """Raises UserError naming the unit where its damages are not finite."""
    if not all(map(math.isfinite, damages)):
        raise UserError(f"{unit}: expected finite gradients, found others: check the weights for NaN or infinity")


@contextmanager
def _hooked(model: Any, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Gradients]]:
    """Collects the layers' gradients while the model runs forwards, one window each, and backwards."""
    found: dict[str, Gradients] = {}

    def seen(name: str) -> Callable[..., None]:
        def forward(layer: nn.Linear, given: tuple[Tensor, ...], out: Tensor) -> None:
            if not out.requires_grad:
                raise UserError(
                    f"{name}: expected gradients of the model's output to reach this layer, found none: add it to the "
                    "recipe's ignore, or take a recipe that measures no sensitivity"
                )
            # Evenly spaced: heads lie one after the other.
            rows = torch.linspace(0, layer.out_features - 1, min(_ROWS, layer.out_features)).round().long()
            one, inputs = found.setdefault(name, Gradients(rows)), given[0].detach()
            out.register_hook(lambda back: one.add(inputs.flatten(0, -2), back.flatten(0, -2)))

        return forward

    # Parameters ask for no gradients, so the first activations have to: a copy, for some models scale them in place.
    hooks = [model.get_input_embeddings().register_forward_hook(lambda *given: given[-1].requires_grad_(True).clone())]
    hooks += [layer.register_forward_hook(seen(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
