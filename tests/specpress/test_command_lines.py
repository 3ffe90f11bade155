"""Whatever stands on the command line, `specpress` does it, or says in a sentence why not and leaves nothing behind.

Thirty lines here, 2,000 with `-m slow`. Options come from the commands themselves, and their values are odd.
"""

import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specpress.cli import load_command
from tests.mutations import assert_sentence, invoke

# Seconds for a line that is sound after all, and would take its time; then it is stopped as by Ctrl-C.
BUDGET = 2
INTEGERS = (
    *("", "-1", "0", "1", "3", "64", "1000000000000", "1" + "0" * 30, "9" * 5000, "nan", "1e9", "x", "1.5"),
    *("\udcff", "٣"),
)
FLOATS = (*INTEGERS, "-0.0", "1e-9", "1e308", "-1e308", "inf", "-inf", "0x10", "1_0", "0.5", "1e-400")
TEXTS = (
    *("", " ", "x", "a" * 300, "a" * 5000, "\udcff", "é\u202e\n", "-", "--", "=", ",", ",,1,", "1,2,1,1", "none"),
    *("auto", "2,2,1,1"),
)
NAMES = ("none", "model", "tree", "lookup", "suffix", "lookup+model", "nested", "medusa", "rejection", "typical")
# Files of the folder below, and places that are no such thing.
PATHS = (
    *("", ".", "..", "./gone", "./gone/too/deep", "./file", "./empty", "./folder", "./loop", "./null", "./locked"),
    *("./up", "./file/below", "~nosuchuser/x", "~", "/dev/null", "/proc/self/mem", "/dev/full/x", "./" + "a" * 300),
    *("./\udcff", "./bad.yaml", "./bad.jsonl", "./random.gguf", "./nf4"),
)
# Options that reach out of the folder, or ask for more than a test is to do.
LEFT_OUT = {"open_", "dry_run", "help", "token", "work"}
_SHAPE = "--shape pair --scheme int8 --widths 1 --rounds 1 --threads 1"
_JOB = "--target ./model --count 1 --new-tokens 2 --threads 1"
# How often each command is tried (those that start processes or run for seconds seldom), and a sound line of it.
LINES: dict[str, tuple[int, str]] = {
    "generate": (8, "--target ./model --prompt def --max-new-tokens 2 --threads 1"),
    "chat": (4, "./model --max-new-tokens 2 --threads 1"),
    "compress": (
        8,
        "--recipe nf4 --model ./model --draft none --calib ./text.txt --samples 1 --seq-len 8 --eval-tokens 0"
        " --no-speed --baselines none --threads 1 --out ./out",
    ),
    "sweep": (1, "--recipes nf4 --out ./out --model ./gone --threads 1"),
    "export": (3, "./run --to gptq --out ./out"),
    "report": (2, "./run"),
    "push": (2, "./run me/it --dry-run"),
    "prompts": (2, "./prompts.jsonl --source ./text.txt --count 1"),
    "bench kernels": (2, _SHAPE),
    "bench decode": (1, _SHAPE),
    "bench speculate": (4, f"{_JOB} --rounds 1 --drafter lookup"),
    "bench load": (3, f"{_JOB} --rate 1000 --requests 2"),
    "bench gpu kernels": (1, "--device cpu --rounds 1"),
}


def sound(tiny: Callable[..., Path], folder: Path) -> Path:
    """A folder with a model, its run, texts, and everything that may stand where a file is expected."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(tiny("llama", hidden_size=128), folder / "model")
    (folder / "text.txt").write_text("def f(a):\n    b = a\n    c = b\n    d = c\n    e = d\n    return e + 1\n" * 40)
    words = LINES["compress"][1].replace("./out", "./run").replace("./", f"{folder}/").split()
    made = invoke(["compress", *words, "--recipe", "int4-rtn"])
    assert made.exit_code == 0, made.output
    for name, content in {
        **{"file": b"x", "empty": b"", "bad.yaml": b"? [a]: b", "bad.jsonl": b"{", "locked": b"x"},
        **{"random.gguf": b"GGUF" + bytes(range(256))},
    }.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    for name, place in {"loop": "loop", "null": "/dev/null", "up": ".."}.items():
        (folder / name).symlink_to(place)
    (folder / "locked").chmod(0)
    return folder


def parameters(name: str) -> list[Any]:
    """The options and arguments of a command, as typer has them."""
    first, *rest = name.split()
    command = load_command(first)
    for part in rest:
        command = command.commands[part]
    return [one for one in command.params if one.name not in LEFT_OUT]


def odd_value(chance: random.Random, parameter: Any) -> str:
    """A value for an option, mostly of its own kind."""
    # typer has changed where the type stands.
    said = vars(parameter).get("type_descriptor", getattr(parameter, "type", ""))
    kind = str(said).partition("parameter_info")[0].lower()
    if parameter.name in ("calib", "source"):
        # Anything else may be a data set of the hub.
        return chance.choice([path for path in PATHS if path.startswith((".", "/", "~"))])
    if chance.random() < 0.1:
        return chance.choice([*FLOATS, *TEXTS, *PATHS])
    if "int" in kind:
        return chance.choice(INTEGERS)
    if "float" in kind:
        return chance.choice(FLOATS)
    if "enum" in kind or "choice" in kind:
        return chance.choice([*NAMES, *TEXTS])
    return chance.choice(PATHS if "path" in kind or chance.random() < 0.7 else TEXTS)


def line(chance: random.Random) -> list[str]:
    """A command line that is sound but for one to three of its words."""
    name = chance.choices(list(LINES), [often for often, _ in LINES.values()])[0]
    words, known = LINES[name][1].split(), parameters(name)
    for _ in range(chance.choice([1, 1, 2, 3])):
        parameter = chance.choice(known)
        option = chance.choice(parameter.opts)
        if parameter.param_type_name == "argument":
            place = [one for one in known if one.param_type_name == "argument"].index(parameter)
            words[place] = odd_value(chance, parameter)
        elif parameter.is_flag:
            words.append(option)
        elif option in words and chance.random() < 0.2:
            del words[words.index(option) : words.index(option) + 2]
        elif option in words:
            words[words.index(option) + 1] = odd_value(chance, parameter)
        else:
            value = odd_value(chance, parameter)
            words += chance.choice([[option, value], [f"{option}={value}"]])
    if chance.random() < 0.1:
        words.insert(chance.randrange(len(words) + 1), chance.choice([*TEXTS, "--bogus", "--help", "-x"]))
    # Of what is repeated the last counts: never more than a test is to do.
    return [*name.split(), *words]


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Ctrl-C after so many seconds, until it is heard."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: Python swallows what is raised while it takes an object away.
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def listing(folder: Path) -> set[str]:
    """Every path below, links not followed."""
    return {f"{at}/{name}" for at, folders, files in os.walk(folder) for name in (*folders, *files)}


def attempt(words: list[str], folder: Path, before: set[str]) -> int:
    """The exit code of a line run in the folder, in which nothing is new where the line was refused."""
    with interrupted(BUDGET):
        found = invoke(words, "hello\n")
    assert found.exit_code in (0, 2, 130) or (words[0] == "sweep" and found.exit_code == 1), found.output
    new = sorted(listing(folder) - before)
    if found.exit_code == 2:
        assert_sentence(found)
        assert not new, new
    for name in new:
        path = Path(name)
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return found.exit_code


def hold(folder: Path, count: int, seed: int = 0) -> Counter[int]:
    """Tries so many lines; returns how often which exit code came of them."""
    codes: Counter[int] = Counter()
    before = listing(folder)
    for number in range(count):
        words = line(random.Random(f"{seed} {number}"))
        try:
            codes[attempt(words, folder, before)] += 1
        except BaseException as error:
            raise AssertionError(f"line {number} of seed {seed}, {words}: {error!r}") from error
    return codes


@pytest.fixture
def folder(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = sound(tiny, tmp_path / "here")
    monkeypatch.chdir(made)
    return made


def test_command_lines_are_done_or_refused(folder: Path) -> None:
    codes = hold(folder, 30)
    assert codes[0] > 0 and codes[2] > 15


@pytest.mark.slow
def test_thousands_of_command_lines(folder: Path) -> None:
    codes = hold(folder, 2000, seed=1)
    assert codes[0] > 100 and codes[2] > 1000
