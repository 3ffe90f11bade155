"""What compressors are compared in: one setting each of GPTQ, AWQ, pruning and SmoothQuant, for ours and for a peer."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from runtime.errors import UserError

# Part of the mean of the Hessian's diagonal that is added to it: llm-compressor's default and ours, given to all.
DAMPING = 0.01


@dataclass(frozen=True)
class Setting:
    """One comparison: everybody gets these values, and its own defaults for what is not here.

    name        as tables print it and --setting takes it.
    peer        whom we are held against: a key of PEERS.
    method      gptq, awq, sparsegpt, wanda or smoothquant.
    target      ours may have this much of the peer's excess log-perplexity.
    bits, group_size, symmetric   of weights; bits of static activations too. group_size 0: a scale per row.
    order       of GPTQ: the inputs are rounded as they come ("none"), the most active first ("inputs": desc_act), or
                so within groups of which the most active comes first ("groups": act_group_aware).
    damping     of GPTQ and SparseGPT.
    search      of GPTQ: ranges of least squared error, not from the smallest weight to the largest.
    sparsity, pattern   of pruning: the share of zeros, and n:m or "" for anywhere.
    alpha       of SmoothQuant.
    """

    name: str
    peer: str
    method: str
    target: float = 1.03
    bits: int = 16
    group_size: int = 0
    symmetric: bool = True
    order: Literal["none", "inputs", "groups"] = "none"
    damping: float = DAMPING
    search: bool = False
    sparsity: float = 0.0
    pattern: str = ""
    alpha: float = 0.0


# By name: the module of makers/ that runs a peer, and what its process alone is started with.
PEERS: dict[str, tuple[str, dict[str, str]]] = {
    "GPTQModel": ("makers.gptqmodel_checkpoint", {"GPTQMODEL_CPU_WORKERS": "4"}),
    "llm-compressor": ("makers.llm_compressor_checkpoint", {}),
}
OURS = "specpress"
OUR_MAKER = "makers.specpress_checkpoint"


def _gptq(bits: int, group_size: int, suffix: str = "", **values: Any) -> Setting:
    return Setting(
        f"gptq-{bits}-g{group_size}{suffix}", "GPTQModel", "gptq", bits=bits, group_size=group_size, **values
    )


def _awq(group_size: int, symmetric: bool = True) -> Setting:
    name = f"awq-4-g{group_size}{'' if symmetric else '-asym'}"
    return Setting(name, "llm-compressor", "awq", bits=4, group_size=group_size, symmetric=symmetric)


def _pruned(method: str, pattern: str = "") -> Setting:
    name = f"{method}-{pattern.replace(':', 'of') or '50'}"
    return Setting(name, "llm-compressor", method, sparsity=0.5, pattern=pattern)


_GRIDS = tuple((bits, group_size) for bits in (4, 3, 2) for group_size in (128, 32))
_ORDERS = (("", "none"), ("-order", "inputs"), ("-grouporder", "groups"))
SETTINGS: tuple[Setting, ...] = (
    *(_gptq(*grid, suffix, order=order) for grid in _GRIDS for suffix, order in _ORDERS),
    _gptq(4, 128, "-asym", symmetric=False),
    _gptq(2, 32, "-asym", symmetric=False),
    _gptq(3, 128, "-search", search=True),
    _gptq(2, 32, "-search", search=True),
    _awq(128),
    _awq(128, symmetric=False),
    _awq(32),
    *(_pruned(method, pattern) for method in ("sparsegpt", "wanda") for pattern in ("", "2:4")),
    Setting("smoothquant-w8a8", "llm-compressor", "smoothquant", target=1.05, bits=8, alpha=0.5),
)
# What takes long enough to be timed, and has a bound: see the third show.
TIMED = ("gptq-4-g128", "awq-4-g128")


def chosen(patterns: Sequence[str] | None, default: Sequence[str] = ("*",)) -> list[Setting]:
    """The settings whose names match one of the patterns ("gptq-4-*"). Raises UserError for one that matches none."""
    wanted = patterns or default
    for pattern in wanted:
        if not any(fnmatchcase(setting.name, pattern) for setting in SETTINGS):
            names = ", ".join(setting.name for setting in SETTINGS)
            raise UserError(f"--setting: expected one of {names}, or a pattern with * in it, found {pattern!r}")
    return [setting for setting in SETTINGS if any(fnmatchcase(setting.name, pattern) for pattern in wanted)]


def our_recipe(setting: Setting) -> dict[str, Any] | None:
    """The recipe that does the same; None where we have nothing of the kind (order within groups)."""
    if setting.order == "groups":
        return None
    method, stages = setting.method, list[dict[str, Any]]()
    if method == "gptq":
        own = {"act_order": setting.order == "inputs", "damping": setting.damping, "search": setting.search}
        stages = [{"quantize": _weights(setting) | own}]
    elif method == "awq":
        stages = [{"quantize": _weights(setting)}]
    elif method == "smoothquant":
        stages = [{"smooth": {"alpha": setting.alpha}}, {"quantize": {"scheme": "int8-static", "method": "rtn"}}]
    else:
        where = {"pattern": setting.pattern} if setting.pattern else {"sparsity": setting.sparsity}
        stages = [{"prune": {"method": method} | where}]
    return {"name": setting.name, "stages": stages}


def _weights(setting: Setting) -> dict[str, Any]:
    return {
        "scheme": f"int{setting.bits}",
        "group_size": setting.group_size,
        "method": setting.method,
        "symmetric": setting.symmetric,
    }
