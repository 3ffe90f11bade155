"""Opens a model that may be damaged: what can be read of it, and a finding for each thing that cannot."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compress.check.findings import Finding
from compress.errors import UserError
from runtime import formats
from runtime.checkpoints import model_config
from runtime.checkpoints.architecture import describe
from runtime.checkpoints.gguf.checkpoint import GgufTensors
from runtime.checkpoints.gguf.config import configure
from runtime.checkpoints.gguf.names import FORMS, ROPE_FACTORS
from runtime.checkpoints.gguf.parts import parts
from runtime.checkpoints.gguf.reader import Header, read_header
from runtime.checkpoints.locate import locate
from runtime.checkpoints.open import older_quantization
from runtime.checkpoints.safetensors import INDEX, SINGLE, Entry, Shards, header, inside
from runtime.errors import UserError as RuntimeFloorError
from runtime.files import read_json
from runtime.formats.schemes import READERS

# Layouts of compressed-tensors and methods of other libraries that exist and are not read here.
_OTHER_LAYOUTS = ("nvfp4", "mxfp4", "mxfp8", "marlin", "sparse", "naive", "dense")
_UNREAD_KEYS = ("sparsity_config", "transform_config")


@dataclass(frozen=True, eq=False)
class Opened:
    """A model's files.

    path      a directory or a GGUF file; shown: its name in findings.
    config    of config.json, or what a GGUF file's metadata says in its words; {}: it cannot be read.
    tensors   those that can be read.
    header    of a GGUF file.
    unread    why packed weights are not read; None: they are.
    lost      tensors that lie in a file that is missing or cut short, or that only the index knows.
    """

    path: Path
    shown: str
    config: dict[str, Any]
    tensors: Shards
    header: Header | None = None
    unread: str | None = None
    lost: frozenset[str] = frozenset()
    findings: list[Finding] = field(default_factory=list)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """`quantization_config` of config.json; None for plain weights, and for GGUF."""
        found = self.config.get("quantization_config")
        return found if isinstance(found, dict) else None

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def form(self) -> str:
        """What the weights are stored in: "GGUF", a `quant_method`, or "plain"."""
        if self.header is not None:
            return "GGUF"
        said = self.quantization or {}
        old = "bitsandbytes" if said.get("load_in_4bit") or said.get("load_in_8bit") else "plain"
        return str(said.get("quant_method") or old)


class LooseShards(Shards):
    """The safetensors files of a directory that can be read; `problems` are findings about the others."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.problems: list[Finding] = []
        self.lost: set[str] = set()
        places = self._index()
        names = sorted(set(places.values())) or self._alone()
        found: list[Path] = []
        self._entries: dict[str, Entry] = {}
        for name in names:
            try:
                file = inside(directory, name, INDEX if places else SINGLE)
                self._entries |= header(file)
                found.append(file)
            except RuntimeFloorError as error:
                gone = sorted(tensor for tensor, place in places.items() if place == name)
                self.lost |= set(gone)
                more = f"; its {len(gone)} tensors are lost, {gone[0]} among them" if gone else ""
                self._problem("broken", "file", name, f"{error}{more}")
        self.files = tuple(found)
        self._compare(places)

    def _problem(self, level: Any, kind: Any, where: str, says: str) -> None:
        self.problems.append(Finding(level=level, kind=kind, where=where, says=says))

    def _index(self) -> dict[str, str]:
        if not (self.directory / INDEX).exists():
            return {}
        try:
            names = read_json(inside(self.directory, INDEX, INDEX)).get("weight_map")
        except RuntimeFloorError as error:
            self._problem("broken", "file", INDEX, str(error))
            return {}
        if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
            self._problem("broken", "file", INDEX, "weight_map must map tensor names to file names")
            return {}
        return dict(names)

    def _alone(self) -> list[str]:
        """Without an index: the one file, or whatever is there."""
        if (self.directory / SINGLE).exists():
            return [SINGLE]
        names = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not names:
            raise UserError(f"{self.directory.name}: expected safetensors weights, found none; give a model directory")
        if not any(problem.where == INDEX for problem in self.problems):
            what = f"expected {SINGLE} or {INDEX}, found {', '.join(names[:3])} alone; loaders do not find the weights"
            self._problem("broken", "file", self.directory.name, what)
        return names

    def _compare(self, places: Mapping[str, str]) -> None:
        """The index against the shards."""
        if not places:
            return
        there = {file.name for file in self.files}
        for tensor, file in places.items():
            entry = self._entries.get(tensor)
            if file not in there or (entry is not None and entry.file.name == file):
                continue
            says = "the file does not hold it" if entry is None else f"it lies in {entry.file.name}"
            if entry is None:
                self.lost.add(tensor)
            self._problem("broken", "file", tensor, f"{INDEX} places it in {file}, but {says}")
        for tensor in sorted(set(self._entries) - set(places)):
            says = f"{self._entries[tensor].file.name} holds it, but {INDEX} does not name it: loaders pass it by"
            self._problem("broken", "file", tensor, says)


def open_loosely(path: str | Path) -> Opened:
    """Opens a model directory, run folder, hub name or GGUF file, whatever state it is in.

    Raises UserError where there is nothing that could be a model.
    """
    given = Path(path).expanduser()
    if given.is_dir() and not (given / "config.json").exists() and any(given.glob("*.safetensors")):
        found = given
    else:
        found = locate(path)
    return _open_gguf(found) if found.is_file() else _open_directory(found)


def _open_directory(directory: Path) -> Opened:
    findings: list[Finding] = []

    def problem(says: str, kind: Any = "config", level: Any = "broken") -> None:
        findings.append(Finding(level=level, kind=kind, where="config.json", says=says))

    config: dict[str, Any] = {}
    try:
        config = read_json(inside(directory, "config.json", "config.json"))
        model_config.check(config, "config.json")
    except RuntimeFloorError as error:
        problem(_without(str(error), "config.json"))
    if config and config.get("quantization_config") is None:
        try:
            if (older := older_quantization(directory)) is not None:
                config["quantization_config"] = older
        except RuntimeFloorError as error:
            problem(str(error))
    tensors = LooseShards(directory)
    unread = None
    try:
        formats.check_supported(config.get("quantization_config"))
    except RuntimeFloorError as error:
        unread = str(error)
        known = _exists_elsewhere(config.get("quantization_config"))
        problem(_without(unread, "config.json"), "unread" if known else "quantization", "note" if known else "broken")
    return Opened(
        directory,
        directory.name,
        config,
        tensors,
        unread=unread,
        lost=frozenset(tensors.lost),
        findings=[*findings, *tensors.problems],
    )


def _exists_elsewhere(quantization: Any) -> bool:
    """Whether a configuration that is not read here is a layout of some library, rather than a damaged one."""
    if not isinstance(quantization, dict):
        return False
    method = quantization.get("quant_method")
    if isinstance(method, str) and method not in READERS:
        return True
    groups = quantization.get("config_groups")
    said = (
        [quantization.get("format"), *(g.get("format") for g in groups.values() if isinstance(g, dict))]
        if isinstance(groups, dict)
        else []
    )
    return any(quantization.get(key) for key in _UNREAD_KEYS) or any(
        str(layout).startswith(_OTHER_LAYOUTS) for layout in said if layout
    )


def _open_gguf(path: Path) -> Opened:
    findings: list[Finding] = []
    try:
        found = read_header(path)
    except RuntimeFloorError as error:
        unread = "has the type" in str(error)
        level: Any = "note" if unread else "broken"
        says = _without(str(error), path.name)
        findings.append(Finding(level=level, kind="unread" if unread else "file", where=path.name, says=says))
        nothing = _Nothing(path)
        return Opened(path, path.name, {}, nothing, unread=str(error), findings=findings)
    try:
        config = configure(found)
        known = _known(found, config)
        for name in sorted(set(found.tensors) - known):
            what = "the architecture has no such tensor"
            findings.append(Finding(level="suspicious", kind="extra", where=name, says=what))
        kept = {name: entry for name, entry in found.tensors.items() if name in known}
        tensors = GgufTensors(replace(found, tensors=kept), config)
    except RuntimeFloorError as error:
        says = _without(str(error), path.name)
        findings.append(Finding(level="broken", kind="config", where=path.name, says=says))
        return Opened(path, path.name, {}, _Nothing(path), found, str(error), findings=findings)
    return Opened(path, path.name, config, tensors, found, findings=findings)


def _known(found: Header, config: Mapping[str, Any]) -> set[str]:
    """The tensors that the architecture has, and those of layers that guess further tokens."""
    a = describe(dict(config))
    if a is None:
        return set(found.tensors)
    architecture = str(found.metadata["general.architecture"])
    of_model = {part.tensor for part in parts(a, FORMS[architecture])} | {ROPE_FACTORS}
    more = found.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    behind = tuple(f"blk.{a.layers + i}." for i in range(min(more, 16) if isinstance(more, int) else 0))
    return of_model | {name for name in found.tensors if behind and name.startswith(behind)}


class _Nothing(Shards):
    """No tensors: a file of which nothing can be read."""

    def __init__(self, path: Path):
        self.directory, self.files = path.parent, (path,)
        self._entries: dict[str, Entry] = {}


def _without(sentence: str, where: str) -> str:
    """A sentence without the place that it begins with."""
    return sentence.removeprefix(f"{where}: ").removeprefix(f"{where} ")
