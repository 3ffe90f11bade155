"""Lists functions, classes, methods and constants that nothing but tests refers to. Exit code 1 where there are any.

A definition counts as used where its name is read anywhere else in the product or the examples: as a name, an
attribute, a keyword, in an annotation, or as a whole string. What is called from outside stands in unused_allowed.txt
beside this file, a name and a reason a line; a line that is no longer needed is told, too.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PRODUCT = ("calib", "runtime", "compress", "specpress")
READERS = (*PRODUCT, "examples", "docs", ".ci")
# Decorators whose functions are called by who decorates.
CALLED = {"command", "callback", "field_validator", "model_validator", "overload"}


class Definition(NamedTuple):
    """Where a name is defined, and up to which line."""

    name: str
    path: Path
    first: int
    last: int


def main() -> int:
    """Prints what is unused."""
    reads: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    for folder in READERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name, line in references(ast.parse(path.read_text(encoding="utf-8"))):
                reads[name].append((path, line))
    for path in (ROOT / "compress/report/templates").iterdir():
        for name in re.findall(r"\w+", path.read_text(encoding="utf-8")):
            reads[name].append((path, 0))
    for name in re.findall(r"[\w.]+:(\w+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8")):
        reads[name].append((ROOT / "pyproject.toml", 0))
    unused = [found for folder in PRODUCT for found in definitions(ROOT / folder) if not is_read(found, reads)]
    lines = (ROOT / ".ci/unused_allowed.txt").read_text(encoding="utf-8").splitlines()
    allowed = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    wrong = [found for found in unused if found.name not in allowed]
    for found in wrong:
        print(f"{found.path.relative_to(ROOT)}:{found.first}: {found.name} is used by nothing but tests")
    stale = sorted(allowed - {found.name for found in unused})
    for name in stale:
        print(f".ci/unused_allowed.txt: {name} is used, or gone: remove the line")
    return int(bool(wrong or stale))


def is_read(found: Definition, reads: dict[str, list[tuple[Path, int]]]) -> bool:
    """Whether it is read anywhere but in itself."""
    places = reads.get(found.name, ())
    return any(path != found.path or not found.first <= line <= found.last for path, line in places)


def definitions(folder: Path) -> Iterator[Definition]:
    """What a floor's files define: at their top, and the methods of their classes."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in [*tree.body, *(inner for c in tree.body if isinstance(c, ast.ClassDef) for inner in c.body)]:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                if not node.name.startswith("__") and not _is_called(node):
                    yield Definition(node.name, path, node.lineno, node.end_lineno or node.lineno)
            elif node in tree.body and isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name) and not target.id.startswith("__"):
                        yield Definition(target.id, path, node.lineno, node.end_lineno or node.lineno)


def _is_called(node: ast.FunctionDef | ast.ClassDef) -> bool:
    words = {word for decorator in node.decorator_list for word in re.findall(r"\w+", ast.unparse(decorator))}
    return bool(words & CALLED)


def references(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that is read. An import is no reading: its use is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.:]+", str(node.value)):
            yield re.split(r"[.:]", str(node.value))[-1], node.lineno
        for field in ("annotation", "returns"):
            inner = getattr(node, field, None)
            for text in ast.walk(inner) if isinstance(inner, ast.AST) else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield from ((name, text.lineno) for name in re.findall(r"\w+", text.value))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast":
            yield from ((name, node.lineno) for name in re.findall(r"\w+", ast.unparse(node.args[0])))


if __name__ == "__main__":
    sys.exit(main())
