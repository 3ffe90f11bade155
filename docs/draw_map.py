"""Draws the map of the code into docs/internals.md: floors, rooms, what each imports, and every file's first line.

python docs/draw_map.py            # writes it
python docs/draw_map.py --check    # exit code 1 where the page is not the tree's
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "internals.md"
BEGIN, END = "<!-- drawn by docs/draw_map.py -->\n", "<!-- end of the map -->"
FLOORS = ("calib", "runtime", "compress", "specpress")
# Where a statement holds others.
_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")


def main() -> int:
    """Writes the page, or compares it."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = f"{before}{BEGIN}{draw()}{END}{after}"
    if "--check" in sys.argv:
        print("docs/internals.md is the tree's" if page == drawn else "docs/internals.md: run python docs/draw_map.py")
        return int(page != drawn)
    PAGE.write_text(drawn, encoding="utf-8")
    return 0


def draw() -> str:
    """The map in Markdown."""
    parts = []
    for floor in FLOORS:
        rooms: dict[str, list[Path]] = {}
        for path in sorted((ROOT / floor).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                inner = path.parent.relative_to(ROOT)
                rooms.setdefault("/".join(inner.parts[:2]), []).append(path)
        below = sorted(set().union(*(_imported(path, depth=1) for paths in rooms.values() for path in paths)) - {floor})
        parts.append(f"### {floor}\n\n{_about(ROOT / floor / '__init__.py')}{_uses(below)}\n")
        parts += [_room(name, paths) for name, paths in rooms.items()]
    return "\n".join(parts)


def _room(name: str, paths: list[Path]) -> str:
    """A table of the files; the files directly in a floor are a room of their own."""
    place = ROOT / name
    is_floor = place.parent == ROOT
    used = sorted(set().union(*(_imported(path, depth=2) for path in paths)) - {name.replace("/", ".")})
    floor = name.split("/")[0]
    near = [room.removeprefix(f"{floor}.") for room in used if room.startswith(f"{floor}.")]
    head = "" if is_floor else f"#### {name}/\n\n{_about(place / '__init__.py')}{_uses(near)}\n\n"
    listed = [path for path in paths if path != place / "__init__.py"]
    rows = [f"| `{path.relative_to(place).as_posix()}` | {_about(path)} |" for path in listed]
    return head + "\n".join(["| file | |", "|---|---|", *rows]) + "\n" if rows else head


def _uses(names: list[str]) -> str:
    return f" Imports {', '.join(f'`{name}`' for name in names)}." if names else ""


def _about(path: Path) -> str:
    """The first sentence of a file's docstring, or of the comment at a C++ file's head, made safe for a table."""
    if not path.exists():
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    else:
        lines = []
        for line in text.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.removeprefix("//").strip())
        text = " ".join(lines)
    words = " ".join(text.split())
    end = words.find(". ")
    return (words if end < 0 else words[: end + 1]).replace("|", "\\|")


def _imported(path: Path, depth: int) -> set[str]:
    """The project's packages that a file imports anywhere, cut to `depth` parts; none of a `__main__`."""
    if path.suffix != ".py" or path.name == "__main__.py":
        return set()
    return {".".join(name.split(".")[:depth]) for name in _names(path) if name.split(".")[0] in FLOORS}


@cache
def _names(path: Path) -> list[str]:
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            is_floor = "." not in node.module
            found += [f"{node.module}.{alias.name}" if is_floor else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        # Statements alone: no import stands within an expression.
        waiting += [one for part in _PARTS for one in getattr(node, part, ())]
    return found


if __name__ == "__main__":
    sys.exit(main())
