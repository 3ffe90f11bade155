"""What a recipe may say: YAML, validated.

A recipe is a mapping with the keys

    name         what the run is called (default: the file's name)
    about        one line on when to choose it
    extends      a recipe to start from: a built-in name, or a path relative to this file
    stages       what to do, in order: one `quantize` so far
    calibration  source, samples, seq_len: defaults for --calib, --samples and --seq-len

`extends` merges key by key: a mapping is merged into the mapping below it, anything else (a value or a list, so also
`stages`) replaces what was there. `name` and `about` are never inherited.
"""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from compress.errors import UserError

_BUILT_IN = Path(__file__).parent / "recipes"
_SUFFIXES = (".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
GROUP_SIZES = (128, 64, 32)
NF4_BLOCK = 64

# Keys and values that the format reserves and this version cannot do yet.
_NOT_BUILT = {
    "kv": "quantised KV caches are not built yet: remove the key",
    "draft": "drafts are not made by recipes yet: remove the key and name one with --draft",
    "export": "exports besides the Hugging Face directory are not built yet: remove the key",
}
_STAGES_NOT_BUILT = ("prune", "smooth", "ternary", "qat", "heal", "distill", "medusa")
_METHODS_NOT_BUILT = ("gptq", "awq", "smoothquant", "hqq")
_SCHEMES_NOT_BUILT = ("int8-static", "int3", "int2", "fp8", "ternary", "nested")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Quantize(_Strict):
    """A stage that rounds linear layers.

    scheme      how a weight is represented.
    group_size  weights that share a scale: int4 only (128, 64 or 32; the first of these, from here down, that divides
                a row is taken). nf4 has 64, int8-dynamic one scale per output channel.
    method      how the codes are chosen; rtn: round to nearest.
    targets     regular expressions, searched in the names of the linear layers of the blocks; any match counts.
    ignore      the same, for layers to leave alone; wins over targets.
    head        keep: the output head stays as it is; int8: it is quantised too (int8-dynamic only).
    """

    scheme: Literal["int8-dynamic", "int4", "nf4"]
    group_size: StrictInt | None = None
    method: Literal["rtn"] = "rtn"
    targets: tuple[StrictStr, ...] = Field(default=(".*",), min_length=1)
    ignore: tuple[StrictStr, ...] = ()
    head: Literal["keep", "int8"] = "keep"

    @field_validator("targets", "ignore")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"expected regular expressions, {pattern!r} is none ({error})") from error
        return patterns

    @model_validator(mode="after")
    def _fit(self) -> "Quantize":
        if self.group_size is not None:
            allowed = {"int4": GROUP_SIZES, "nf4": (NF4_BLOCK,), "int8-dynamic": ()}[self.scheme]
            if self.group_size not in allowed:
                expected = f"one of {', '.join(map(str, allowed))}" if allowed else "no group_size"
                raise ValueError(f"group_size: expected {expected} with scheme {self.scheme}, found {self.group_size}")
        if self.head == "int8" and self.scheme != "int8-dynamic":
            raise ValueError(
                f"head: expected keep with scheme {self.scheme}, found int8: it goes with scheme int8-dynamic so far"
            )
        return self


class Stage(_Strict):
    """One step: a mapping with one key, the step's kind."""

    quantize: Quantize


class Calibration(_Strict):
    """Where text comes from (`calib.corpora.load`), windows to calibrate on, and tokens in a window."""

    source: StrictStr | None = None
    samples: Annotated[StrictInt, Field(ge=1, le=100_000)] | None = None
    seq_len: Annotated[StrictInt, Field(ge=8, le=131_072)] | None = None


class Recipe(_Strict):
    """A validated recipe, with everything it extends merged in."""

    name: StrictStr
    about: StrictStr = ""
    stages: tuple[Stage, ...] = Field(min_length=1, max_length=1)
    calibration: Calibration = Calibration()

    @field_validator("name")
    @classmethod
    def _safe(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("expected up to 64 letters, digits, dots, dashes and underscores")
        return name

    @property
    def quantize(self) -> Quantize:
        """The one quantise stage."""
        return self.stages[0].quantize

    @classmethod
    def load(cls, recipe: "str | Path | Recipe") -> "Recipe":
        """The built-in recipe of that name, or the one in that file.

        Raises UserError for an unknown name (the nearest is offered), YAML that cannot be read (with its line), an
        unknown key, a value out of range, something that is not built yet, and an `extends` loop.
        """
        if isinstance(recipe, Recipe):
            return recipe
        path = _find(str(recipe), Path())
        merged = _merged(path, ())
        return _validate(merged, path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, complete, without `extends`: what recipe.yaml and the report hold."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_yaml(self) -> str:
        """The text of recipe.yaml: loading it gives this recipe again."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)


def built_in() -> list[Recipe]:
    """The recipes that come with the package, by name."""
    return [Recipe.load(path) for path in sorted(_BUILT_IN.glob("*.yaml"))]


def _find(name: str, base: Path) -> Path:
    """The file that a name or a path (relative to `base`) stands for."""
    if not name.endswith(_SUFFIXES) and "/" not in name:
        known = [path.stem for path in sorted(_BUILT_IN.glob("*.yaml"))]
        if name in known:
            return _BUILT_IN / f"{name}.yaml"
        if not (base / name).is_file():
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise UserError(
                f"recipe {name!r} is unknown: expected {', '.join(known)} or the path of a YAML file; "
                f"did you mean {near[0]!r}?"
            )
    path = base / name
    if not path.is_file():
        raise UserError(f"recipe {name}: expected a YAML file, found none there: correct the path")
    return path


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, of which the plain loader silently takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} stands there twice", problem_mark=key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        # SafeLoader's subclass: builds plain data only.
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{_show(path)}, line {line}: not valid YAML ({error.problem}): correct the line") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{_show(path)}: expected YAML in UTF-8, found something else ({error}): rewrite it") from error
    except OSError as error:
        raise UserError(f"{_show(path)} cannot be read ({error.strerror}): check the file's permissions") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise UserError(f"{_show(path)}: expected a mapping with the key stages, found {found}: see a built-in recipe")
    return data


def _show(path: Path) -> str:
    return f"recipe {path.stem}" if path.parent == _BUILT_IN else str(path)


def _merged(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The file's mapping over those that it extends. `chain`: the files that led here."""
    here = path.resolve()
    if here in chain:
        loop = " -> ".join(p.stem for p in (*chain[chain.index(here) :], here))
        raise UserError(f"{_show(path)}: extends goes round in a loop ({loop}): remove one of the links")
    data = _read(path)
    parent = data.pop("extends", None)
    data.setdefault("name", path.stem)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise UserError(f"{_show(path)}: extends: expected one name or path, found {parent!r}: correct it")
    below = _merged(_find(parent, path.parent), (*chain, here))
    below.pop("about", None)
    return _over(below, data)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _over(out[key], value) if both else value
    return out


def _validate(data: dict[str, Any], path: Path) -> Recipe:
    for key, why in _NOT_BUILT.items():
        if data.get(key) is not None:
            raise UserError(f"{_show(path)}: {key}: {why}")
    kept = {key: value for key, value in data.items() if key not in _NOT_BUILT}
    try:
        return Recipe.model_validate(kept)
    except ValidationError as error:
        raise UserError(f"{_show(path)}: {_sentence(error)}") from error


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, unknown keys first: a misspelt key also shows up as a missing one."""
    problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
    first = problems[0]
    location = first["loc"]
    key = ".".join(map(str, location))
    found = first["input"]
    shown = repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."
    last = str(location[-1]) if location else ""
    if first["type"] == "extra_forbidden":
        if last in _STAGES_NOT_BUILT and location[0] == "stages" and len(location) == 3:
            return f"{key}: this stage is not built yet, expected quantize: remove it"
        allowed = [*_fields(location[:-1]), *(["extends"] if len(location) == 1 else [])]
        near = difflib.get_close_matches(last, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else "remove it"
        return f"{key}: unknown key, expected one of {', '.join(allowed)}: {hint}"
    if first["type"] == "missing":
        return f"{key}: expected this key, found none: add it"
    if first["type"] == "literal_error":
        expected = str(first["ctx"]["expected"]).replace("'", "")
        if found in (*_METHODS_NOT_BUILT, *_SCHEMES_NOT_BUILT):
            return f"{key}: {found} is not built yet, expected {expected}: change it"
        near = difflib.get_close_matches(str(found), re.split(", | or ", expected), n=1)
        return f"{key}: expected {expected}, found {shown}: " + (f"did you mean {near[0]}?" if near else "change it")
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        join = "." if message.startswith(("group_size", "head")) else ": "
        return f"{key}{join}{message}{'' if 'found' in message else f', found {shown}'}: correct it"
    if key == "stages" and isinstance(found, (list, tuple)):
        return f"stages: expected exactly one quantize stage so far, found {len(found)}: correct it"
    if first["type"] == "model_type":
        return f"{key}: expected a mapping, found {shown}: correct it"
    message = (
        first["msg"]
        .replace("Input should be", "expected", 1)
        .replace("a valid integer", "a whole number")
        .replace("a valid ", "a ")
    )
    return f"{key}: {message}, found {shown}: correct it"


def _fields(location: tuple[int | str, ...]) -> list[str]:
    models: dict[tuple[str, ...], type[BaseModel]] = {
        (): Recipe,
        ("stages",): Stage,
        ("stages", "quantize"): Quantize,
        ("calibration",): Calibration,
    }
    names = tuple(part for part in location if isinstance(part, str))
    return list(models[names].model_fields)
