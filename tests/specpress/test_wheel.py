"""What a wheel carries besides Python files."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Compiled into the native library, or made by running the project.
NOT_DATA = {".py", ".pyc", ".cpp", ".h", ".so"}


def test_every_data_file_is_in_a_package_s_data() -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = {
        f"{package.replace('.', '/')}/{pattern}"
        for package, found in about["tool"]["setuptools"]["package-data"].items()
        for pattern in found
    }
    floors = ("calib", "runtime", "compress", "specpress")
    files = [path for floor in floors for path in (ROOT / floor).rglob("*") if path.is_file()]
    data = [str(path.relative_to(ROOT)) for path in files if path.suffix not in NOT_DATA]
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert len(data) > 30 and not any(fnmatch("runtime/kernels/other.txt", pattern) for pattern in patterns)
