"""engines.py --llama-bench: what is asked of the binary, how its JSON is read, and what a wrong path is told.

The stand-in speaks llama-bench's JSON (llama.cpp's tools/llama-bench: one object a test). The real one is not on any
package index.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import UserError

COMPARE = Path(__file__).parents[2] / "examples" / "compare"
_BINARY = """#!{python}
import json, sys
if "--help" in sys.argv:
    print("usage: llama-bench -p, --n-prompt <n>  -n, --n-gen <n> {depth}")
    sys.exit(0)
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
value = dict(zip(sys.argv[1::2], sys.argv[2::2]))
repeats = int(value["-r"])
if value["-p"] == "7":
    sys.exit("ggml: no memory")
print(json.dumps([{{
    "build_commit": "abc1234", "build_number": 4242, "model_type": "llama 1B Q4_0", "model_size": 600,
    "n_prompt": int(value["-p"]), "n_gen": int(value["-n"]),
    "samples_ns": [1_500_000 + i for i in range(repeats)],
}}]))
"""


def stand_in(folder: Path, depth: str = "-d, --n-depth <n>") -> tuple[Path, Path]:
    path, log = folder / "llama-bench", folder / "asked.jsonl"
    path.write_text(_BINARY.format(python=sys.executable, log=str(log), depth=depth))
    path.chmod(0o755)
    return path, log


def asked_of_a_worker(options: dict[str, str], requests: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "workers.llama_bench"]
    command += [part for name, value in options.items() for part in (f"--{name}", value)]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(command, cwd=COMPARE, input=lines, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.parametrize(("depth", "deep"), [("-d, --n-depth <n>", ["-d", "64"]), ("", [])])
def test_a_binary_is_asked_for_each_width_and_its_samples_are_read(
    compare: Any, tmp_path: Path, depth: str, deep: list[str]
) -> None:
    path, log = stand_in(tmp_path, depth)
    binary = compare("llama_bench_binary").bench_binary(path, "-rtr '1'")
    options = {"model": "m.gguf", "threads": "2", "context": "64", "prefill": "512", "vocabulary": "32000"}
    requests = [
        {"do": "forward", "width": 1, "repeats": 3},
        {"do": "forward", "width": 8, "repeats": 2},
        {"do": "prefill"},
    ]
    replies, _ = asked_of_a_worker(options | {"kernels": "auto"} | binary.options(), requests)
    about, *found = replies
    assert about["weight_bytes"] == 600
    assert about["facts"]["version"] == "abc1234 (4242)"
    assert about["facts"]["measures"].endswith("context 64" if deep else "context 0")
    assert found == [{"ms": [1.5, 1.500001, 1.500002]}, {"ms": [1.5, 1.500001]}, {"ms": [1.5]}]
    start = ["-m", "m.gguf", "-t", "2", "-rtr", "1"]
    assert [json.loads(line) for line in log.read_text().splitlines()[1:]] == [
        [*start, "-p", "0", "-n", "1", *deep, "-r", "3", "-o", "json"],
        [*start, "-p", "8", "-n", "0", *deep, "-r", "2", "-o", "json"],
        [*start, "-p", "512", "-n", "0", "-r", "1", "-o", "json"],
    ]


def test_a_binary_that_fails_ends_the_worker_with_its_last_words(compare: Any, tmp_path: Path) -> None:
    binary = compare("llama_bench_binary").bench_binary(stand_in(tmp_path)[0], "")
    options = {"model": "m.gguf", "threads": "2", "context": "64", "prefill": "512", "vocabulary": "32000"}
    replies, said = asked_of_a_worker(
        options | {"kernels": "auto"} | binary.options(), [{"do": "forward", "width": 7, "repeats": 1}]
    )
    assert len(replies) == 1
    assert said.splitlines()[-1] == "RuntimeError: llama-bench ended with exit code 1: ggml: no memory"


def test_other_paths_are_refused_in_a_sentence(compare: Any, tmp_path: Path) -> None:
    bench_binary = compare("llama_bench_binary").bench_binary
    with pytest.raises(UserError, match="does not answer --help as llama-bench does"):
        bench_binary(Path("/bin/echo"), "")
    with pytest.raises(UserError, match=r"cannot be run \(No such file or directory\)"):
        bench_binary(tmp_path / "none", "")
    with pytest.raises(UserError, match=r"cannot be run \(Permission denied\)"):
        bench_binary(tmp_path, "")
    plain = tmp_path / "plain"
    plain.write_text("no binary")
    plain.chmod(0o755)
    with pytest.raises(UserError, match=r"cannot be run \(Exec format error\)"):
        bench_binary(plain, "")
    with pytest.raises(UserError, match="cannot be split"):
        bench_binary(stand_in(tmp_path)[0], "-rtr '1")
