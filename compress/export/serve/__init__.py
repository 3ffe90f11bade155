"""Ready-made commands and configuration files for other engines: `SERVE.md` and `serve/` of a run folder.

One module per engine, with `KEY`, `TITLE`, `PACKAGE`, `section(facts) -> Section`, `uses(section)`, the keys that a
section needs an engine to accept, and `installed()`, the keys that the engine itself says it accepts (ImportError where
it is not there). keys/<engine>.json holds the documented ones, with the version that they were read from.

Nothing here is covered by the manifest: users change ports and sizes in it.
"""

import importlib
from pathlib import Path
from types import ModuleType

from compress.artifact.files import remove, write_atomic
from compress.export.serve.page import markdown
from compress.export.serve.parts import FOLDER, Section
from compress.export.serve.run_facts import Facts, read

PAGE = "SERVE.md"
ENGINES = ("vllm", "sglang", "tensorrt_llm", "llama_cpp", "openvino", "onnxruntime", "ray_serve")


def module(engine: str) -> ModuleType:
    """An engine's module."""
    return importlib.import_module(f"compress.export.serve.{engine}")


def sections(facts: Facts) -> list[Section]:
    """Every engine's section for a run."""
    return [module(engine).section(facts) for engine in ENGINES]


def write(run: Path) -> list[Section]:
    """Writes SERVE.md and serve/*.{yaml,json} of a run folder, and removes those that are of no use any more.

    Raises UserError where the run cannot be read.
    """
    facts = read(run)
    made = sections(facts)
    texts = {file.path: file.text for section in made for file in section.files}
    folder = run / FOLDER
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.is_file() and path.suffix in (".yaml", ".json") and f"{FOLDER}/{path.name}" not in texts:
            remove(path)
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        write_atomic(run / name, text.encode())
    write_atomic(run / PAGE, markdown(facts, made).encode())
    return made


__all__ = ["ENGINES", "PAGE", "module", "sections", "write"]
