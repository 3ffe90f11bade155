"""Ready-made commands and configuration files for other engines: `SERVE.md` and `serve/` of a run folder.

One module per engine, with `KEY`, `TITLE`, `PACKAGE`, `section(facts) -> Section` and `installed()`, the keys that the
engine itself says it accepts (ImportError where it is not there). Of a section's options and of the keys in its files
`TABLES` names those whose values have keys of their own, or are names that the engine knows: in which table they stand.
keys/<engine>.json holds the documented tables, with the version that they were read from.

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
    return importlib.import_module(f"compress.export.serve.{engine}")


def sections(facts: Facts) -> list[Section]:
    return [module(engine).section(facts) for engine in ENGINES]


def write(run: Path) -> list[Section]:
    """Writes SERVE.md and serve/*.{yaml,json} of a run folder, and removes those that are of no use any more.

    Raises UserError where the run cannot be read.
    """
    facts = read(run)
    made = sections(facts)
    texts = {run / file.path: file.text for section in made for file in section.files}
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for path in (*folder.glob("*.yaml"), *folder.glob("*.json")):
        if path.is_file() and path not in texts:
            remove(path)
    texts[run / PAGE] = markdown(facts, made)
    for path, text in texts.items():
        write_atomic(path, text.encode())
    return made
