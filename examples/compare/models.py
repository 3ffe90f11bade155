"""The models of a comparison: random weights of one shape in each engine's own format.

The peers' take minutes to make and are kept; ours takes seconds and is written anew, so that it is never out of date.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UserError

HERE = Path(__file__).parent.absolute()


def interpreters(peer_python: Path, target: str, needed: bool = True) -> tuple[Path, Path]:
    """Ours and the peers', which `make target` builds. Raises UserError where that is needed and not there."""
    if needed and not peer_python.is_file():
        raise UserError(f"--peer-python: there is no {peer_python}; `make {target}` builds that environment")
    # absolute, not resolved: an environment's python is a link whose own place says which environment it is
    return Path(sys.executable).absolute(), peer_python.absolute()


def require_native_kernels() -> None:
    """Raises UserError where they do not run on this machine."""
    from runtime.native import PATHS, usable

    if not any(usable(path)[0] for path in PATHS):
        raise UserError(f"the native kernels, which are to be compared, do not run here: {usable('portable')[1]}")


@dataclass(frozen=True)
class Workshop:
    """Where models are made: `folder` is the shape's (or the pair's) own, `say` tells the user what takes time."""

    folder: Path
    shape: str
    python: Path
    peer_python: Path
    threads: int
    say: Callable[[str], None]


def make_peers(shop: Workshop, models: Sequence[str]) -> None:
    """Makes those of the named models that are not there yet; each appears complete or not at all.

    Raises UserError where a maker fails (disk, memory, or an environment that lacks a package).
    """
    missing = [name for name in models if not (shop.folder / name).exists()]
    if not missing:
        return
    shop.folder.mkdir(parents=True, exist_ok=True)
    from runtime.bench.shapes import SHAPES

    with tempfile.TemporaryDirectory(prefix=".making-", dir=shop.folder) as made:
        room = Path(made)
        config = room / "config.json"
        config.write_text(json.dumps(dict(SHAPES[shop.shape].config)))
        files = [name for name in missing if name.endswith(".gguf")]
        if files:
            shop.say(f"making {', '.join(files)} (once; minutes)")
            outs = [f"{Path(name).stem}={room / name}" for name in files]
            run_maker(shop, True, "makers.gguf_models", str(config), str(shop.threads), *outs)
            for name in files:
                (room / name).rename(shop.folder / name)
        folders = [name for name in missing if name not in files]
        if folders:
            shop.say("making a random checkpoint (removed at the end)")
            run_maker(shop, False, "makers.random_checkpoint", str(config), str(room / "checkpoint"))
        for name in folders:
            shop.say(f"making {name} (once; minutes)")
            kind, scheme = name.rsplit("-", 1)
            checkpoint, out = str(room / "checkpoint"), str(room / name)
            if kind == "openvino":
                run_maker(shop, True, "makers.openvino_model", checkpoint, out, scheme)
            else:
                run_maker(shop, False, "makers.bitsandbytes_nf4", checkpoint, out)
            (room / name).rename(shop.folder / name)


@contextmanager
def our_model(shop: Workshop, scheme: str) -> Iterator[Path]:
    """Our model directory in a scheme, head int8 per channel; gone when the block ends."""
    from runtime.bench.random_models import write_shape

    shop.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ours-", dir=shop.folder) as made:
        yield write_shape(shop.shape, scheme, Path(made) / "model", head="int8")


def environment(threads: int, kernels: str = "auto") -> dict[str, str]:
    """What makers and workers are started with: the number of threads for all OpenMP code, and no network.

    kernels  "avx2": oneDNN (OpenVINO's too), MKL and torch keep to it. llama.cpp is built for it.
    """
    held = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    given = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | given | (held if kernels == "avx2" else {})


def run_maker(shop: Workshop, peer: bool, module: str, *arguments: str) -> None:
    """Runs one of makers/ in a process of its own: in its environment, and giving its memory back.

    Raises UserError where it fails, with its last words.
    """
    command = [str(shop.peer_python if peer else shop.python), "-m", module, *arguments]
    done = subprocess.run(command, cwd=HERE, env=environment(shop.threads), capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        log = shop.folder / f"{module}.log"
        log.write_text(done.stdout + done.stderr)
        raise UserError(f"{module} failed with exit code {done.returncode}: {last}; see {log}")
