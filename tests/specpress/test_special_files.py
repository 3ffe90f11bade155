"""Pipes, sockets, devices and folders where a file is expected: done without it, or refused in a sentence; none hangs.

A few places here, all of them in each way with `-m slow`.
"""

import os
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.mutations import assert_sentence, invoke
from tests.specpress.test_broken_files import FEW, sound

# Seconds that a command may take, of which none takes three.
LIMIT = 30
_NEW = "--max-new-tokens 2 --threads 1"
_FEW = " ".join(FEW)
_COMPRESS = f"compress --recipe nf4 --model plain --out out {_FEW}"
_GPTQ = f"compress --recipe int4-gptq --samples 2 --seq-len 16 --model plain --out out {_FEW}"
_SPECULATE = "bench speculate --target run/model --count 1 --new-tokens 2 --threads 1 --rounds 1 --drafter lookup"
_MODEL = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "a.safetensors", "model.safetensors.index.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "added_tokens.json", "chat_template.json", "quantize_config.json"),
)
# What is no file, and a command that would read or replace it.
PLACES = (
    *((f"run/model/{name}", f"generate --prompt x {_NEW} --target run/model") for name in _MODEL),
    *((f"run/model/{name}", f"chat run/model {_NEW}") for name in _MODEL),
    *((f"plain/{name}", _COMPRESS) for name in (*_MODEL, "model.safetensors")),
    *(
        (f"run/{name}", command)
        for name in ("report.json", "report.md", "manifest.json", "recipe.yaml", "model/README.md")
        for command in ("report run", "push run me/it --dry-run", "export run --to gptq --out out")
    ),
    *((name, f"{_GPTQ} --calib {name}") for name in ("x.txt", "x.jsonl", "x.jsonl.gz", "x.parquet", "x")),
    *((name, f"prompts out.jsonl --count 1 --source {name}") for name in ("x.txt", "x.jsonl.gz", "x.parquet")),
    *((name, f"{_SPECULATE} --prompts {name}") for name in ("x.txt", "x.jsonl", "x.jsonl.gz")),
    *((name, f"compress --recipe {name} --model plain --out out {_FEW}") for name in ("x", "x.yaml")),
    *((name, f"generate --prompt x {_NEW} --target {name}") for name in ("x", "x.gguf", "x/config.json")),
    ("x", f"generate --prompt x {_NEW} --target run/model --draft x"),
    ("x", f"generate --prompt x {_NEW} --target run/model --drafter suffix --corpus x"),
    ("x/medusa.json", f"generate --prompt x {_NEW} --target run/model --drafter medusa --draft x"),
    *((name, "prompts x --count 1 --source text.txt") for name in ("x", "x.partial")),
    *((name, f"compress --recipe nf4 --model plain --out x {_FEW}") for name in ("x", "x.partial")),
    *((name, "export run --to gptq --out x") for name in ("x", "x/model", "x/config.json")),
    ("x", "bench kernels --shape pair --scheme int8 --widths 1 --rounds 1 --threads 1 --json x"),
    ("x", f"sweep --recipes nf4 --model plain --out x {_FEW}"),
)
# Pipes at one place of each reader and writer of files.
QUICK = ("run/report.json", "run/report.md", "run/manifest.json", "run/model/config.json", "run/model/tokenizer.json")
QUICK_OPTIONS = ("--source x.jsonl.gz", "--prompts x.txt", "--recipe x.yaml", "--corpus x", "prompts x", "--out x")


def pipe(place: Path) -> None:
    os.mkfifo(place)


def listener(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(place))


def folder(place: Path) -> None:
    place.mkdir()


def nothing(place: Path) -> None:
    place.symlink_to("/dev/null")


def without_end(place: Path) -> None:
    place.symlink_to("/dev/zero")


def locked(place: Path) -> None:
    place.write_bytes(b"{}")
    place.chmod(0)


WAYS = (pipe, listener, folder, nothing, without_end, locked)


@pytest.fixture
def here(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a plain model, a run, and a text."""
    (tmp_path / "sound").mkdir()
    sound(tiny, tmp_path / "sound")
    shutil.copytree(tiny("llama", hidden_size=128), tmp_path / "sound" / "plain")
    (tmp_path / "sound" / "text.txt").write_text("def f(a):\n    b = a\n    c = b\n    d = c\n    return d + 1\n" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def attempt(here: Path, place: str, way: Callable[[Path], None], command: str) -> int:
    """The exit code of a command where something is no file; a refusal leaves nothing behind."""
    shutil.rmtree(here / "now", ignore_errors=True)
    shutil.copytree(here / "sound", here / "now")
    os.chdir(here / "now")
    path = Path(place)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    way(path)
    before = set(here.rglob("*"))
    # The signal's own action is the end of the process, also where a library waits for the pipe.
    signal.alarm(LIMIT)
    try:
        found = invoke(command.split(), "hello\n")
    finally:
        signal.alarm(0)
    if found.exit_code:
        assert_sentence(found)
        assert set(here.rglob("*")) == before
    return found.exit_code


def hold(here: Path, ways: Iterable[Callable[[Path], None]], places: Iterable[tuple[str, str]]) -> Counter[int]:
    """How often which exit code came of the places in these ways."""
    codes: Counter[int] = Counter()
    for place, command in places:
        for way in ways:
            try:
                codes[attempt(here, place, way, command)] += 1
            except BaseException as error:
                raise AssertionError(f"{place} as {way.__name__}, {command}: {error!r}") from error
    return codes


def test_pipes_are_not_waited_for(here: Path) -> None:
    few = [(place, words) for place, words in PLACES if place in QUICK or words.endswith(QUICK_OPTIONS)]
    codes = hold(here, [pipe], few)
    assert codes[0] > 3 and codes[2] > 12
    # The positive: what is a file is read.
    shutil.copytree(here / "sound", here / "other")
    os.chdir(here / "other")
    done = [invoke(words.split(), "hello\n") for place, words in few if place.startswith("run/model")]
    assert done and all(found.exit_code == 0 for found in done)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_place_where_a_file_is_expected(here: Path, way: Callable[[Path], None]) -> None:
    codes = hold(here, [way], PLACES)
    print(f"{way.__name__}: {codes[0]} done without it, {codes[2]} refused")
    assert codes[2] > 30
