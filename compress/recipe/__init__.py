"""What a recipe may say: YAML, validated.

A recipe is a mapping with the keys

    name         what the run is called (default: the file's name)
    about        one line on when to choose it
    extends      a recipe to start from: a built-in name, or a path relative to this file
    stages       what to do, in order (stages.py): to blocks (block_stages.py) and by training (training_stages.py)
    kv           how the runtime is to keep keys and values: scheme
    calibration  source, samples, seq_len: defaults for --calib, --samples and --seq-len
    export       forms that other engines read, made of the finished model (compress.export), as --export does

`extends` merges key by key: a mapping is merged into the mapping below it, anything else (a value or a list, so also
`stages`) replaces what was there. `name` and `about` are never inherited.
"""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, StrictBool, StrictInt, StrictStr, ValidationError, field_validator, model_validator

from compress.errors import UserError
from compress.recipe.block_stages import Prune, Quantize, Rotate, Smooth, Strict
from compress.recipe.exports import check_exports
from compress.recipe.renamed import with_new_names
from compress.recipe.stages import ORDER, Stage, check_order
from compress.recipe.training import Budget
from runtime.errors import meant

# A scheme that the format reserves and this version cannot do yet.
_SCHEMES_NOT_BUILT = ("nested",)
# Our own validators put the key that they speak of in front.
_KEYED = re.compile(
    r"(scheme|group_size|symmetric|method|layers|act_order|damping|drift|residual|search|observer|bits_per_weight|head|sparsity|pattern|share|"
    r"minutes|joint): "
)

Fields = Callable[[tuple[int | str, ...]], list[str]]
Note = Callable[[str], None]


def sentence(error: ValidationError, fields: Fields) -> str:
    """The first thing that is wrong, unknown keys first: a misspelt key also shows up as a missing one.

    fields  gives the keys that the mapping at a location may have.
    """
    problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
    first: Any = problems[0]
    location = first["loc"]
    key = ".".join(map(str, location))
    found = first["input"]
    shown = repr(found) if len(repr(found)) <= 60 else repr(found)[:57] + "..."
    kind = first["type"]
    if kind == "extra_forbidden":
        allowed = fields(location[:-1])
        hint = meant(str(location[-1]), allowed, "remove it")
        return f"{key}: unknown key, expected one of {', '.join(allowed)}: {hint}"
    if kind == "missing":
        return f"{key}: expected this key, found none: add it"
    if kind == "literal_error":
        return _not_allowed(key, found, shown, str(first["ctx"]["expected"]).replace("'", ""))
    if kind == "value_error":
        message = str(first["ctx"]["error"])
        join = "" if not key else "." if _KEYED.match(message) else ": "
        return f"{key}{join}{message}{'' if 'found' in message else f', found {shown}'}: correct it"
    if kind == "model_type":
        return f"{key}: expected a mapping, found {shown}: correct it"
    message = (
        first["msg"]
        .replace("Input should be", "expected", 1)
        .replace("a valid integer", "a whole number")
        .replace("a valid ", "a ")
    )
    return f"{key}: {message}, found {shown}: correct it"


def _not_allowed(key: str, found: Any, shown: str, expected: str) -> str:
    if found in _SCHEMES_NOT_BUILT:
        return f"{key}: {found} is not built yet, expected {expected}: change it"
    hint = meant(str(found), re.split(", | or ", expected), "change it")
    return f"{key}: expected {expected}, found {shown}: {hint}"


_BUILT_IN = Path(__file__).parents[1] / "recipes"
_SUFFIXES = (".yaml", ".yml")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyValue(Strict):
    """How the runtime keeps keys and values: its schemes, calibrated by the run; rotated: in a basis of each head."""

    scheme: Literal["int8", "int4", "int3"]
    rotated: StrictBool = False

    @model_validator(mode="after")
    def _built(self) -> "KeyValue":
        if self.rotated and self.scheme == "int8":
            raise ValueError("expected int4 or int3 beside rotated: true (eight bits lose nothing that it would save)")
        if self.scheme == "int3" and not self.rotated:
            raise ValueError("expected rotated: true beside scheme: int3 (three bits lose too much without)")
        return self


class Calibration(Strict):
    """Where text comes from (`calib.corpora.load`), windows to calibrate on, and tokens in a window."""

    source: StrictStr | None = None
    samples: Annotated[StrictInt, Field(ge=1, le=100_000)] | None = None
    seq_len: Annotated[StrictInt, Field(ge=8, le=131_072)] | None = None


class Recipe(Strict):
    """A validated recipe, with everything it extends merged in."""

    name: StrictStr
    about: StrictStr = ""
    stages: tuple[Stage, ...] = ()
    kv: KeyValue | None = None
    calibration: Calibration = Calibration()
    export: tuple[StrictStr, ...] | None = None

    @field_validator("name")
    @classmethod
    def _safe(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("expected up to 64 letters, digits, dots, dashes and underscores")
        return name

    @field_validator("stages")
    @classmethod
    def _ordered(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        check_order(stages)
        return stages

    @field_validator("export")
    @classmethod
    def _known(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        try:
            return None if names is None else check_exports(names)
        except UserError as error:
            raise ValueError(error) from error

    @model_validator(mode="after")
    def _does_something(self) -> "Recipe":
        if not self.stages and self.kv is None:
            raise ValueError(f"stages: expected at least one of {', '.join(ORDER)} (or the key kv), found none")
        return self

    @property
    def quantize(self) -> Quantize | None:
        """The one quantise stage, if there is one."""
        return next((stage.quantize for stage in self.stages if stage.quantize is not None), None)

    @property
    def prunes(self) -> tuple[Prune, ...]:
        return tuple(stage.prune for stage in self.stages if stage.prune is not None)

    @property
    def rotate(self) -> Rotate | None:
        """The stage that rotates, if there is one."""
        return next((stage.rotate for stage in self.stages if stage.rotate is not None), None)

    @property
    def trains(self) -> bool:
        return any(stage.trained is not None for stage in self.stages)

    @property
    def changes(self) -> bool:
        """Whether stages change weights that are not packed."""
        return bool(self.prunes) or self.trains

    def only(self, *kinds: str) -> "Recipe":
        """The recipe with its stages of these kinds only."""
        return self.model_copy(update={"stages": tuple(stage for stage in self.stages if stage.kind in kinds)})

    def with_budget(self, budget: Budget) -> "Recipe":
        """The recipe with another budget for every stage that trains. Raises UserError where none does."""
        if not self.trains:
            raise UserError(f"--minutes and --tokens: recipe {self.name} has no stage that trains: leave them out")
        stages = []
        for stage in self.stages:
            if (trained := stage.trained) is not None:
                changed = trained.model_copy(update={"training": trained.training.with_budget(budget)})
                stage = stage.model_copy(update={stage.kind: changed})
            stages.append(stage)
        return self.model_copy(update={"stages": tuple(stages)})

    @classmethod
    def load(cls, recipe: "str | Path | Recipe", note: Note | None = None) -> "Recipe":
        """The built-in recipe of that name, or the one in that file.

        note  is told of keys under old names; without it they are FutureWarnings.
        Raises UserError for an unknown name (the nearest is offered), YAML that cannot be read (with its line), an
        unknown key, a value out of range, something that is not built yet, and an `extends` loop.
        """
        if isinstance(recipe, Recipe):
            return recipe
        path = _find(str(recipe), Path())
        merged = _merged(path, (), note or (lambda line: warnings.warn(line, FutureWarning, stacklevel=2)))
        if merged.pop("draft", None) is not None:
            raise UserError(
                f"{_show(path)}: draft: drafts are made by a stage: write the key under stages, or name a draft with "
                "--draft"
            )
        try:
            return Recipe.model_validate(merged)
        except ValidationError as error:
            raise UserError(f"{_show(path)}: {sentence(error, _fields)}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data, complete, without `extends`: what recipe.yaml and the report hold."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_yaml(self) -> str:
        """The text of recipe.yaml: loading it gives this recipe again."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)


def built_in() -> list[Recipe]:
    """The recipes that come with the package, by name."""
    return [Recipe.load(path) for path in sorted(_BUILT_IN.glob("*.yaml"), key=lambda path: path.stem)]


def text_of(name: str) -> str:
    """A recipe's file as it stands, comments included. Raises UserError for an unknown name and an unreadable file."""
    path = _find(name, Path())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{_show(path)} cannot be read ({error}): check the file") from error


def _find(name: str, base: Path) -> Path:
    """The file that a name or a path (relative to `base`) stands for."""
    if not name.endswith(_SUFFIXES) and "/" not in name:
        known = [path.stem for path in sorted(_BUILT_IN.glob("*.yaml"))]
        if name in known:
            return _BUILT_IN / f"{name}.yaml"
        if not (base / name).is_file():
            raise UserError(
                f"recipe {name!r} is unknown: expected {', '.join(known)} or the path of a YAML file; "
                f"{meant(name, known, '', cutoff=0.0)}"
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
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem="a key must be one word, and is a list or a mapping", problem_mark=key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value!r} stands there twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path, note: Note) -> dict[str, Any]:
    try:
        # SafeLoader's subclass: builds plain data only.
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{_show(path)}, line {line}: not valid YAML ({error.problem}): correct the line") from error
    except OSError as error:
        raise UserError(f"{_show(path)} cannot be read ({error.strerror}): check the file's permissions") from error
    except Exception as error:  # numbers, dates and bytes are converted as they stand, whatever comes of it
        raise UserError(f"{_show(path)}: expected YAML in UTF-8, found something else ({error}): rewrite it") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise UserError(f"{_show(path)}: expected a mapping with the key stages, found {found}: see a built-in recipe")
    try:
        return with_new_names(data, lambda line: note(f"{_show(path)}: {line}"))
    except ValueError as error:
        raise UserError(f"{_show(path)}: {error}") from error


def _show(path: Path) -> str:
    return f"recipe {path.stem}" if path.parent == _BUILT_IN else str(path)


def _merged(path: Path, chain: tuple[Path, ...], note: Note) -> dict[str, Any]:
    """The file's mapping over those that it extends. `chain`: the files that led here."""
    here = path.resolve()
    if here in chain:
        loop = " -> ".join(p.stem for p in (*chain[chain.index(here) :], here))
        raise UserError(f"{_show(path)}: extends goes round in a loop ({loop}): remove one of the links")
    data = _read(path, note)
    parent = data.pop("extends", None)
    data.setdefault("name", path.stem)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise UserError(f"{_show(path)}: extends: expected one name or path, found {parent!r}: correct it")
    below = _merged(_find(parent, path.parent), (*chain, here), note)
    below.pop("about", None)
    return _over(below, data)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _over(out[key], value) if both else value
    return out


def _fields(location: tuple[int | str, ...]) -> list[str]:
    """The keys that the mapping at a place of the recipe may have."""
    model: type[Strict] = Recipe
    names = [part for part in location if isinstance(part, str)]
    for name in names:
        model = _mapping(model.model_fields[name].annotation) or model
    extra = ["extends"] if not names else []
    return [*model.model_fields, *extra]


def _mapping(annotation: Any) -> type[Strict] | None:
    """The mapping in a key's type, `tuple[Stage, ...]` or `Quantize | None` for two."""
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        return annotation
    return next((found for part in get_args(annotation) if (found := _mapping(part)) is not None), None)


__all__ = ["KeyValue", "Prune", "Quantize", "Recipe", "Rotate", "Smooth", "Stage", "built_in"]
