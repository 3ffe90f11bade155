"""Comments and docstrings name files and modules that exist, so that a reader can follow them."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("calib", "runtime", "compress", "specpress")
SOURCES = sorted(
    path
    for folder in (*PRODUCT, "examples", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h")
)
# A name with a slash may begin anywhere in the tree; the look-behind leaves out what follows an address or a pattern.
FILE = re.compile(r"(?<![\w./$*{}<-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h))\b(?![\w(])")
MODULE = re.compile(r"(?<![\w./-])((?:calib|runtime|compress)(?:\.[a-z_]+)+)\b")
# Files of others, and endings that are meant as such.
FOREIGN = {"llama.cpp", "ik_llama.cpp", "bitnet.cpp", "_test.py", "conftest.py", "setup.py"}


@cache
def known() -> tuple[str, ...]:
    return tuple(str(path.relative_to(ROOT)) for path in SOURCES)


def prose(path: Path) -> list[tuple[int, str]]:
    """Comments and docstrings of a source file, each with the line that it begins in."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        found = re.finditer(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)
        return [(text.count("\n", 0, match.start()) + 1, match.group()) for match in found]
    words = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [(token.start[0], token.string) for token in words if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return comments + [(getattr(n, "lineno", 1), doc) for n in nodes if (doc := ast.get_docstring(n, clean=False))]


def is_file(name: str, path: Path) -> bool:
    """Whether a comment in `path` can call a file so: in full or from its end, and alone where it is not ambiguous."""
    if name in FOREIGN:
        return True
    ends = [other for other in known() if other == name or other.endswith(f"/{name}")]
    if "/" in name or path.is_relative_to(ROOT / "tests"):
        return bool(ends)
    return (path.parent / name).exists() or len([end for end in ends if end.startswith(PRODUCT)]) == 1


def is_module(name: str) -> bool:
    """Whether it is a package or module, or something in one. What a module defines is not looked up."""
    parts = name.split(".")
    place = ROOT / parts[0]
    for part in parts[1:]:
        if (place / f"{part}.py").exists():
            return True
        if not (place / part).is_dir():
            inside = (place / "__init__.py").read_text(encoding="utf-8")
            return re.search(rf"\b{part}\b", inside) is not None
        place /= part
    return True


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(ROOT)) for path in SOURCES])
def test_comments_name_what_exists(path: Path) -> None:
    wrong = []
    for line, text in prose(path):
        wrong += [f"{line}: {name}" for name in FILE.findall(text) if not is_file(name, path)]
        wrong += [f"{line}: {name}" for name in MODULE.findall(text) if not is_module(name)]
    assert not wrong
