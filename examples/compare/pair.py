"""The embedded pair in each engine's own format, and the prompts that its target is measured on.

The peers' formats are made once for each pair, ours is compressed anew, so that it is never out of date.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models import Workshop, run_maker

if TYPE_CHECKING:
    from ways import Way


@dataclass(frozen=True)
class Formats:
    """Target and draft as an engine loads them; `draft` is never read where the engine has no draft models."""

    target: Path
    draft: Path


def fingerprint(pair: Formats) -> str:
    """Twelve hexadecimal digits that change with any weight or setting of the pair."""
    digest = hashlib.sha256()
    for folder in (pair.target, pair.draft):
        for file in sorted(folder.iterdir()):
            if file.suffix in (".json", ".safetensors"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def make_peer_formats(shop: Workshop, pair: Formats, ways: Sequence["Way"]) -> dict[str, Formats]:
    """By engine; a format that is not there yet is made and appears complete or not at all.

    Raises UserError where a maker fails.
    """
    engines = {way.engine for way in ways}
    made = {"transformers": pair}
    shop.folder.mkdir(parents=True, exist_ok=True)
    if "openvino" in engines:
        made["openvino"] = Formats(*(_openvino(shop, folder) for folder in (pair.target, pair.draft)))
    if "llama.cpp" in engines:
        made["llama.cpp"] = Formats(_gguf(shop, pair.target), pair.draft)
    return made


def _once(shop: Workshop, name: str, make: Callable[[Path], None]) -> Path:
    """The workshop's file or folder of that name; `make` writes it, in an empty folder, where it is not there yet."""
    out = shop.folder / name
    if not out.exists():
        shop.say(f"making {name} (once)")
        with tempfile.TemporaryDirectory(prefix=".making-", dir=shop.folder) as room:
            make(Path(room) / name)
            (Path(room) / name).rename(out)
    return out


def _openvino(shop: Workshop, checkpoint: Path) -> Path:
    """int8, as the random models of engines.py are; with the tokenizer, which a pipeline wants."""
    return _once(
        shop,
        f"openvino-int8-{checkpoint.name}",
        lambda out: run_maker(shop, True, "makers.openvino_model", str(checkpoint), str(out), "int8"),
    )


def _gguf(shop: Workshop, checkpoint: Path) -> Path:
    """Our own export in float32, quantised by llama.cpp itself."""
    from compress.export import silent
    from compress.export.gguf.file import write

    def make(out: Path) -> None:
        write(checkpoint, out.parent, silent, floats="f32")
        (source,) = out.parent.glob("*.gguf")
        run_maker(shop, True, "makers.gguf_models", str(source), str(shop.threads), f"Q8_0={out}")

    return _once(shop, f"{checkpoint.name}-Q8_0.gguf", make)


@contextmanager
def our_format(shop: Workshop, pair: Formats) -> Iterator[Formats]:
    """The run folder of the int8-dynamic recipe, without a report; gone when the block ends."""
    from compress.pipeline import compress

    with tempfile.TemporaryDirectory(prefix=".ours-", dir=shop.folder) as room:
        artifact = compress(pair.target, "int8-dynamic", Path(room) / "int8", pair.draft, report=lambda *_: {})
        yield Formats(artifact.model, artifact.model.parent / "draft")


def positions(pair: Formats) -> int:
    """Tokens that a text may have: the positions of the shorter-sighted of the two."""
    from transformers import AutoConfig

    return min(AutoConfig.from_pretrained(folder).max_position_embeddings for folder in (pair.target, pair.draft))


def held_out_prompts(pair: Formats, source: str, count: int, seed: int, room: int) -> tuple[str, list[list[int]]]:
    """The corpus's name, and the report's prompts for it as tokens; the front of one longer than `room` is cut off.

    Raises calib's UserError where the corpus has fewer, or cannot be read.
    """
    from transformers import AutoTokenizer

    from calib import corpora
    from calib.prompts import prompts

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    corpus = corpora.load(source)
    texts = prompts(corpus, count, seed)
    return corpus.name, [list(tokenizer(text, verbose=False)["input_ids"])[-room:] for text in texts]
