"""Mixtures of experts as separate linear layers, so that each expert is calibrated, counted and packed by itself.

transformers 5 keeps the experts of a layer as two fused parameters: gate_up_proj (E, 2I, H), or up_proj (E, I, H) where
there is no gate, and down_proj (E, H, I).
Nothing that quantises an nn.Linear sees them there. Which experts see enough text to be calibrated depends on the
router; those that do not are named, never passed over in silence.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.errors import UserError
from compress.recipe.block_stages import Experts
from compress.records import ExpertRecord

# The layers that read an expert's input, by their number.
FIRST = {1: ("up_proj",), 2: ("gate_proj", "up_proj")}


class Expert(nn.Module):
    """One expert: down(act(gate(x)) · up(x)), or down(act(up(x))); linear layers without bias."""

    def __init__(self, first: Sequence[Tensor], down: Tensor, act: Callable[[Tensor], Tensor]):
        """first: the weights of gate and up, or of up alone."""
        super().__init__()
        for name, weight in zip(FIRST[len(first)], first, strict=True):
            setattr(self, name, _linear(weight))
        self.down_proj = _linear(down)
        self.act = act

    @property
    def first(self) -> tuple[nn.Linear, ...]:
        """Gate and up, or up alone."""
        return tuple(getattr(self, name) for name in FIRST[2] if hasattr(self, name))

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) to (T, H). Hooks on the linear layers see `x`."""
        hidden: Tensor = self.down_proj(self._activated([layer(x) for layer in self.first]))
        return hidden

    def unseen(self, x: Tensor) -> Tensor:
        """The same product with the same bits, past all hooks."""
        inside = self._activated([F.linear(x, layer.weight) for layer in self.first])
        return F.linear(inside, self.down_proj.weight)

    def _activated(self, made: Sequence[Tensor]) -> Tensor:
        gate = self.act(made[0])
        return gate * made[1] if len(made) == 2 else gate


class UnfusedExperts(nn.ModuleList):
    """Stands in for a fused experts module and gives its outputs, to float rounding: expert e is child "e".

    counts  (E,) int64, tokens routed to each expert since `counted` began; None outside of it.
    """

    def __init__(self, first: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]):
        """first (E, 2I, H), gates and factors, or (E, I, H); down (E, H, I). The experts' weights are views of them."""
        super().__init__(Expert(one.split(down.shape[2]), d, act) for one, d in zip(first, down, strict=True))
        self.first = FIRST[first.shape[1] // down.shape[2]]
        self.counts: Tensor | None = None
        self.shown_all: frozenset[int] = frozenset()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, H); top_k_index (T, k) int64 and top_k_weights (T, k): which experts, how much of each."""
        if self.counts is not None:
            self.counts += torch.bincount(top_k_index.flatten().cpu(), minlength=len(self))[: len(self)]
        out = torch.zeros_like(hidden_states)
        for number, expert in enumerate(cast(Iterable[Expert], self)):
            token, place = (top_k_index == number).nonzero(as_tuple=True)
            if number in self.shown_all:
                expert(hidden_states)  # for the statistics' hooks; what comes out is not used
                share = expert.unseen(hidden_states[token])
            elif len(token):
                share = expert(hidden_states[token])
            else:
                continue
            out.index_add_(0, token, (share * top_k_weights[token, place, None]).to(out.dtype))
        return out


def unfuse(block: nn.Module) -> tuple[str, ...]:
    """Replaces every fused experts module inside a decoder layer; returns their paths ("mlp.experts").

    Works on the meta device too: then the weights of single experts can be loaded into the new paths. Raises UserError
    for fused experts of a form that this cannot split without changing what they compute.
    """
    found = [(path, module) for path, module in block.named_modules() if _is_fused(module)]
    for path, module in found:
        parent, _, name = path.rpartition(".")
        first = module.gate_up_proj if hasattr(module, "gate_up_proj") else module.up_proj
        unfused = UnfusedExperts(first.data, module.down_proj.data, module.act_fn)
        setattr(block.get_submodule(parent), name, unfused.train(module.training))
    return tuple(path for path, _ in found)


@contextmanager
def counted(block: nn.Module, all_tokens: Collection[str] = ()) -> Iterator[dict[str, int]]:
    """Counts the tokens that are routed to each expert meanwhile; the mapping, by expert's path, is filled at the end.

    all_tokens  experts ("mlp.experts.3") whose linear layers are shown every token, for hooks to see. What the block
                computes stays the router's choice, in the same bits.
    """
    mixtures = {path: m for path, m in block.named_modules() if isinstance(m, UnfusedExperts)}
    known = {f"{path}.{number}" for path, m in mixtures.items() for number in range(len(m))}
    if not known.issuperset(all_tokens):
        raise ValueError(f"no experts at {sorted(set(all_tokens) - known)}")
    counts: dict[str, int] = {}
    try:
        for path, mixture in mixtures.items():
            mixture.counts = torch.zeros(len(mixture), dtype=torch.int64)
            mixture.shown_all = frozenset(n for n in range(len(mixture)) if f"{path}.{n}" in all_tokens)
        yield counts
    finally:
        for path, mixture in mixtures.items():
            assert mixture.counts is not None
            counts |= {f"{path}.{number}": int(count) for number, count in enumerate(mixture.counts)}
            mixture.counts, mixture.shown_all = None, frozenset()


def starved(counts: Mapping[str, int], least: int) -> tuple[str, ...]:
    """The experts, by path, that fewer than `least` tokens were routed to."""
    return tuple(path for path, tokens in counts.items() if tokens < least)


def records(block: int, counts: Mapping[str, int], policy: Experts) -> list[ExpertRecord]:
    """A line of the report for each expert of block number `block`."""
    few = set(starved(counts, policy.min_tokens))
    otherwise: Literal["all tokens", "rounded to nearest"] = (
        "all tokens" if policy.expert_fallback == "all-tokens" else "rounded to nearest"
    )
    return [
        ExpertRecord(block, int(path.rpartition(".")[2]), tokens, otherwise if path in few else "calibrated")
        for path, tokens in counts.items()
    ]


def _is_fused(module: nn.Module) -> bool:
    """Whether a module is fused experts of the known form. Raises UserError for those of another."""
    parameters = dict(module.named_parameters(recurse=False))
    if not any(p.ndim == 3 and name.endswith("_proj") for name, p in parameters.items()):
        return False
    problem = _problem(module, parameters)
    if problem is not None:
        raise UserError(
            f"{type(module).__name__}: expected experts as gate_up_proj (E, 2I, H) or up_proj (E, I, H), and down_proj"
            f" (E, H, I), found {problem}: this mixture cannot be split; use the recipe nf4, which leaves experts alone"
        )
    return True


def _problem(module: Any, parameters: Mapping[str, nn.Parameter]) -> str | None:
    name = "gate_up_proj" if "gate_up_proj" in parameters else "up_proj"
    if set(parameters) != {name, "down_proj"} or (name == "up_proj" and getattr(module, "has_gate", True)):
        return f"the parameters {', '.join(sorted(parameters))}"
    first, down = parameters[name].shape, parameters["down_proj"].shape
    if first != (down[0], (2 if name == "gate_up_proj" else 1) * down[2], down[1]):
        return f"the shapes {tuple(first)} and {tuple(down)}"
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return "another order of the same weights"
    if getattr(module, "has_post_expert_norm", False) or not callable(getattr(module, "act_fn", None)):
        return "more than gate, up, activation and down"
    if name == "up_proj":
        return None
    # Some architectures clamp or shift between gate and up, or activate both at once. Trying it tells.
    probe = torch.linspace(-40, 40, 4 * down[2], device="cpu").view(2, 2 * down[2])
    gate, up = probe.chunk(2, dim=-1)
    with suppress(TypeError, RuntimeError):
        if not hasattr(module, "_apply_gate") or torch.allclose(module._apply_gate(probe), module.act_fn(gate) * up):
            return None
    return "a gate of its own"


def _linear(weight: Tensor) -> nn.Linear:
    """A linear layer around a weight (N, K), without initialising or copying anything."""
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
