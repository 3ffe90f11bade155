"""The stages of a recipe that work block by block: what each may say."""

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from runtime.formats.patterns import trouble
from runtime.formats.schemes import FITTED, GRIDS, SCHEMES

if TYPE_CHECKING:
    SchemeName = str
else:
    SchemeName = Literal[tuple(SCHEMES)]

DAMPING = 0.01
# Keys that only some methods know, and their values where the recipe does not say.
_METHOD_KEYS: dict[str, dict[str, Any]] = {
    "rtn": {"search": False},
    "gptq": {"act_order": False, "damping": DAMPING, "search": False, "drift": 0.0},
    "awq": {},
    "hqq": {},
    "sensitivity": {},
    "per-layer": {},
}
# Of those, what a trellis with method gptq has.
_TRELLIS_KEYS = {"damping": DAMPING, "fold": "auto", "drift": 0.0}
_TRELLISES = tuple(name for name in FITTED if name not in GRIDS)
# What rounding needs no more than the layer's name for; one model holds what is of one library beside each other.
MIXABLE = ("int8-dynamic", *GRIDS, *_TRELLISES)

Share = Annotated[float, Field(gt=0, lt=1, strict=False)]
# More than this of the blocks leaves no model (prune/depth.py).
BlockShare = Annotated[float, Field(gt=0, lt=0.8, strict=False)]


class Strict(BaseModel):
    """A mapping that takes no unknown keys and does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns. Raises ValueError for one that is no regular expression, or one that could search for ever."""
    for pattern in patterns:
        if (why := trouble(pattern)) is not None:
            raise ValueError(f"expected regular expressions, {pattern[:60]!r} cannot be used ({why})")
    return patterns


class Experts(Strict):
    """What happens to experts that saw fewer than `min_tokens` tokens.

    expert_fallback  all-tokens: they are calibrated on every token, as if the router had sent them all; rtn: rounded to
                     nearest.
    """

    expert_fallback: Literal["all-tokens", "rtn"] = "all-tokens"
    min_tokens: Annotated[StrictInt, Field(ge=0)] = 256


class LayerScheme(Strict):
    """How some layers of a stage with method per-layer are rounded: as a stage says it of all of them.

    targets    regular expressions, searched in the names of the linear layers; any match counts.
    act_order  gptq: whether inputs are taken by their activations' size, the largest first.
    """

    scheme: SchemeName
    group_size: StrictInt | None = None
    method: Literal["rtn", "gptq"] = "rtn"
    act_order: StrictBool = False
    targets: tuple[StrictStr, ...] = Field(min_length=1)

    @field_validator("targets")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(patterns)

    @model_validator(mode="after")
    def _fit(self) -> "LayerScheme":
        if self.scheme not in MIXABLE:
            raise ValueError(f"scheme: expected one of {', '.join(MIXABLE)}, found {self.scheme}")
        if self.method == "gptq" and self.scheme not in FITTED:
            raise ValueError(f"method: expected rtn with scheme {self.scheme}, found gptq")
        if self.act_order and (self.method != "gptq" or self.scheme not in GRIDS):
            raise ValueError(
                f"act_order: expected with method gptq and scheme {', '.join(GRIDS)} only, found method {self.method} "
                f"and scheme {self.scheme}"
            )
        check_group(self.group_size, SCHEMES[self.scheme].group_sizes, f"scheme {self.scheme}")
        return self

    @property
    def stage(self) -> "Quantize":
        """The stage that rounds these layers alone; ranges are searched where there are any."""
        search = True if self.scheme in GRIDS else None
        return Quantize(
            scheme=self.scheme,
            group_size=self.group_size,
            method=self.method,
            targets=self.targets,
            search=search,
            act_order=True if self.act_order else None,
        )


def check_group(size: int | None, allowed: tuple[int, ...], where: str) -> None:
    """Raises ValueError for a group size that is not among those allowed `where`."""
    if size is not None and size not in allowed:
        expected = f"one of {', '.join(map(str, allowed))}" if allowed else "no group_size"
        raise ValueError(f"group_size: expected {expected} with {where}, found {size}")


class Quantize(Strict):
    """A stage that rounds linear layers.

    scheme      how a weight is represented; left out with the methods sensitivity, which chooses by layer, and
                per-layer. ternary and ternary-1.25 ruin a model that was not trained for them: the stage ternary
                (compress.qat) trains one.
    group_size  weights that share a scale: int6 to int2 (128, 64 or 32; the first of these, from here down, that
                divides a row is taken). nf4 has 64, int8 and fp8 one scale per output channel, ternary one
                per layer.
    symmetric   int6 to int2: whether ranges are symmetric about zero; false: every group has a zero point.
    method      how the codes are chosen; rtn: round to nearest; sensitivity: by the damage that each layer does;
                per-layer: as `layers` says.
    layers      per-layer: schemes, and the layers that each is for; of several that match a layer the first one counts,
                and layers that none matches stay as they are.
    act_order   gptq: whether inputs are taken by their activations' size, the largest first.
    damping     gptq: added to the Hessian's diagonal, as a share of its mean.
    drift       gptq: how far weights are moved before they are rounded, to make up for what rounded blocks before have
                changed of their inputs; 0: GPTQ as published, 1: GPTAQ (compress/quantize/drift.py). Experts' are not.
    fold        gptq on a trellis: whether input channels are scaled beforehand, where the layer before can take the
                factor. auto: of families whose structure is known (compress/quantize/folding.py).
    observer    int8-static: how far each layer's input range reaches. search: where its outputs are nearest to the
                float ones; minmax, moving_average, percentile (99.99 % of the values), mse, entropy: by its inputs
                alone (calib/observers.py).
    search      gptq and rtn with groups: whether ranges are searched for the least squared error.
    bits_per_weight  sensitivity: how many bits a quantised weight may take on average, scales included.
    targets     regular expressions, searched in the names of the linear layers of the blocks; any match counts.
    ignore      the same, for layers to leave alone; wins over targets.
    head        keep: the output head stays as it is; int8: it is quantised too (int8-dynamic only).
    experts     of a mixture of experts, with methods that look at text: what happens to those that saw too few tokens.
    """

    scheme: SchemeName | None = None
    group_size: StrictInt | None = None
    symmetric: StrictBool | None = None
    method: Literal["rtn", "gptq", "awq", "hqq", "sensitivity", "per-layer"] = "rtn"
    layers: tuple[LayerScheme, ...] | None = Field(default=None, min_length=1)
    act_order: StrictBool | None = None
    damping: Annotated[float, Field(gt=0, le=1)] | None = None
    search: StrictBool | None = None
    drift: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    fold: Literal["auto"] | StrictBool | None = None
    observer: Literal["search", "minmax", "moving_average", "percentile", "mse", "entropy"] | None = None
    bits_per_weight: Annotated[float, Field(ge=2, le=8)] | None = None
    targets: tuple[StrictStr, ...] = Field(default=(".*",), min_length=1)
    ignore: tuple[StrictStr, ...] = ()
    head: Literal["keep", "int8"] = "keep"
    experts: Experts | None = None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fills in what the method and the scheme have, so that the recipe that is kept says everything."""
        if not isinstance(data, dict):
            return data
        grouped = data.get("scheme") in GRIDS
        method = data.get("method", "rtn")
        known = _METHOD_KEYS.get(method, {}) if isinstance(method, str) and grouped else {}
        if data.get("scheme") in _TRELLISES and method == "gptq":
            known = _TRELLIS_KEYS
        filled = {key: value for key, value in known.items() if data.get(key) is None}
        if grouped and data.get("symmetric") is None:
            filled["symmetric"] = method != "hqq"
        if data.get("scheme") == "int8-static" and data.get("observer") is None:
            filled["observer"] = "search"
        return {**data, **filled}

    @field_validator("targets", "ignore")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(patterns)

    @model_validator(mode="after")
    def _fit(self) -> "Quantize":
        if (self.layers is None) == (self.method == "per-layer"):
            found = "none" if self.layers is None else f"method {self.method}"
            raise ValueError(f"layers: expected with method per-layer, and there only, found {found}")
        if self.method == "sensitivity":
            self._fit_budget()
            return self
        if self.method == "per-layer":
            self._fit_layers()
            return self
        if self.scheme is None:
            raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, found none")
        if self.bits_per_weight is not None:
            raise ValueError(f"bits_per_weight: expected with method sensitivity only, found method {self.method}")
        # `sensitivity` chooses the schemes itself; the others have grids to choose codes of, or nearest codes alone.
        choosing = ("sensitivity", "per-layer")
        methods = [name for name in _METHOD_KEYS if name not in choosing] if self.scheme in GRIDS else ["rtn"]
        methods += ["gptq"] if self.scheme in _TRELLISES else []
        if self.method not in methods:
            expected = " or ".join(methods)
            raise ValueError(f"method: expected {expected} with scheme {self.scheme}, found {self.method}")
        check_group(self.group_size, SCHEMES[self.scheme].group_sizes, f"scheme {self.scheme}")
        if self.symmetric is not None and self.scheme not in GRIDS:
            raise ValueError(f"symmetric: expected with {', '.join(GRIDS)} only, found scheme {self.scheme}")
        known = _METHOD_KEYS[self.method] if self.scheme in GRIDS else {}
        if self.scheme in _TRELLISES and self.method == "gptq":
            known = _TRELLIS_KEYS
        for key in ("act_order", "damping", "search", "fold", "drift"):
            if getattr(self, key) is not None and key not in known:
                owners = " or ".join(method for method, keys in _METHOD_KEYS.items() if key in keys) or "gptq"
                schemes = (*(GRIDS if key != "fold" else ()), *(_TRELLISES if key in _TRELLIS_KEYS else ()))
                raise ValueError(
                    f"{key}: expected with method {owners} and scheme {', '.join(schemes)} only, found method "
                    f"{self.method} and scheme {self.scheme}"
                )
        if self.observer is not None and self.scheme != "int8-static":
            raise ValueError(f"observer: expected with scheme int8-static only, found scheme {self.scheme}")
        if self.head == "int8" and self.scheme != "int8-dynamic":
            raise ValueError(
                f"head: expected keep with scheme {self.scheme}, found int8: it goes with scheme int8-dynamic so far"
            )
        return self

    def _fit_budget(self) -> None:
        if self.bits_per_weight is None:
            raise ValueError("bits_per_weight: expected a number from 2 to 8 with method sensitivity, found none")
        for key in ("scheme", "symmetric", "act_order", "damping", "search", "fold", "drift", "observer"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: expected none with method sensitivity, which chooses it, found one")
        check_group(self.group_size, SCHEMES["int4"].group_sizes, "method sensitivity")

    def _fit_layers(self) -> None:
        for key in (
            "scheme",
            "group_size",
            "symmetric",
            "act_order",
            "damping",
            "search",
            "fold",
            "drift",
            "observer",
            "bits_per_weight",
        ):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: expected none with method per-layer, whose layers say it, found one")
        if self.head == "int8":
            raise ValueError("head: expected keep with method per-layer, found int8: it is no layer of a block")
        libraries: dict[str, str] = {}
        for one in self.layers or ():
            libraries.setdefault(SCHEMES[one.scheme].codes.library, one.scheme)
        if len(libraries) > 1:
            apart = " and ".join(libraries.values())
            raise ValueError(f"layers: expected schemes that one model can hold together, found {apart}")

    def of(self, module: str) -> "Quantize | None":
        """The stage that rounds a layer: itself, or with method per-layer what says it of this one; None: nothing."""
        if self.layers is None:
            return self
        parts = (one for one in self.layers if any(re.search(pattern, module) for pattern in one.targets))
        return None if (part := next(parts, None)) is None else part.stage


class Prune(Strict):
    """A stage that takes weights away.

    method    magnitude, wanda, sparsegpt: single weights become zeros; width: heads and MLP channels go; depth: blocks.
    sparsity  of single weights: the share that becomes zero.
    pattern   of single weights, instead: so many of every group stay ("2:4": two of four).
    share     width and depth: how much of the blocks' weights goes, below 0.8.
    """

    method: Literal["magnitude", "wanda", "sparsegpt", "width", "depth"]
    sparsity: Share | None = None
    pattern: Literal["2:4", "4:8"] | None = None
    share: BlockShare | None = None

    @model_validator(mode="after")
    def _fit(self) -> "Prune":
        if self.method in ("width", "depth"):
            unwanted = next((key for key in ("sparsity", "pattern") if getattr(self, key) is not None), None)
            if unwanted:
                raise ValueError(f"{unwanted}: expected share with method {self.method}, found {unwanted}")
            if self.share is None:
                raise ValueError(f"share: expected a share between 0 and 0.8 with method {self.method}, found none")
            return self
        if self.share is not None:
            raise ValueError(f"share: expected sparsity or pattern with method {self.method}, found share")
        if (self.sparsity is None) == (self.pattern is None):
            found = "both" if self.sparsity is not None else "none"
            raise ValueError(f"sparsity: expected either sparsity or pattern with method {self.method}, found {found}")
        return self


class Rotate(Strict):
    """A stage that turns the model into another basis, in which its numbers are more alike; its answers stay.

    residual  the residual stream. A head that is the embedding becomes a table of its own.
    values    each head's values.
    """

    residual: StrictBool = True
    values: StrictBool = True

    @model_validator(mode="after")
    def _something(self) -> "Rotate":
        if not self.residual and not self.values:
            raise ValueError("residual: expected residual or values to be rotated, found neither")
        return self


class Smooth(Strict):
    """A stage that moves the range of activations into the weights before them (SmoothQuant).

    alpha  0 leaves it all in the activations, 1 moves it all into the weights; search: measured block by block.
    """

    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["search"] = 0.5

    @field_validator("alpha", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        if value == "search" or (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1):
            return value
        raise ValueError("expected a number from 0 to 1 or search")
