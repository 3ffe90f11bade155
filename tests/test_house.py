"""The plan of the house: floors import downwards, rooms and files in no circle, and nothing has grown out of its room.

Rooms are the folders directly in a floor, and the files directly in it; the map is docs/internals.md. Commands
(`__main__`, and what runs under it) may call whatever they start.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "calib": set(),
    "runtime": set(),
    "compress": {"calib", "runtime"},
    "specpress": {"calib", "runtime", "compress"},
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for floor in FLOORS
    for path in (ROOT / floor).rglob("*.py")
}
# Longer than 340 lines, and why.
LONG: dict[str, str] = {}


def imports(module: str) -> Iterator[str]:
    """The project's modules that a module imports anywhere, for types and inside functions, too."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if "__name__ ==" not in ast.unparse(node)[:20]]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FLOORS:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)


GRAPH = {module: set(imports(module)) - {module} for module in FILES if not module.endswith("__main__")}


def room(module: str) -> str:
    """A floor's folder, or a file that lies directly in it."""
    return ".".join(module.split(".")[:2])


def test_no_floor_imports_upwards() -> None:
    upwards = [
        f"{module} imports {other}"
        for module, found in GRAPH.items()
        for other in found
        if (floor := module.split(".")[0]) != (below := other.split(".")[0]) and below not in FLOORS[floor]
    ]
    assert not upwards and len(GRAPH) > 200


def test_neither_files_nor_rooms_form_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for module, found in GRAPH.items():
        if module not in FLOORS:  # a floor's front page names what it offers
            rooms.setdefault(room(module), set()).update(room(other) for other in found)
    for graph in (GRAPH, {name: found - {name} for name, found in rooms.items()}):
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_a_circle_would_be_seen() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_nothing_has_grown_out_of_its_room() -> None:
    for floor in ("runtime", "compress"):
        assert len(list((ROOT / floor).glob("*.py"))) <= 10, floor
    lengths = {name: path.read_text(encoding="utf-8").count("\n") for name, path in FILES.items()}
    assert {name: count for name, count in lengths.items() if count > 340 and name not in LONG} == {}
