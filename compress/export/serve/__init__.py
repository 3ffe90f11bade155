"""Ready-made commands and configuration files for other engines: `SERVE.md` and `serve/` of a run folder.

One module per engine, with `KEY`, `TITLE`, `PACKAGE`, `section(facts) -> Section` and `installed()`, the keys that the
engine itself says it accepts (ImportError where it is not there). Of a section's options and of the keys in its files
`TABLES` names those whose values have keys of their own, or are names that the engine knows: in which table they stand.
keys/<engine>.json holds the documented tables, with the version that they were read from.

Nothing here is covered by the manifest: users change ports and sizes in it.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from compress.artifact.files import remove, write_atomic
from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import FOLDER, Command, Section, documented
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


def markdown(facts: Facts, sections: Sequence[Section]) -> str:
    """The page: what all engines have in common, then each of them."""
    drafting = "the model in draft/" if target.drafts(facts) else "n-grams of the text itself (prompt lookup)"
    paragraphs = told(
        f"# Serving {facts.name}",
        f"The model is {target.contents(facts)}, of type {facts.model_type}. What drafts: {drafting}; γ ="
        f" {facts.length} token{'' if facts.length == 1 else 's'} a round. {facts.why}",
        not facts.pays
        and "So take the plain commands; the speculative ones are here for other machines, where it may pay.",
        "Every command is for this folder, and listens on this machine only: put an address of your network in where"
        " others are to reach it, behind something that asks who they are. Sizes of 2 stand for the number of GPUs that"
        " you have. `python -m compress.export . --check` compares every key with the engines that are installed, and"
        " with the documented ones where they are not. Exports write this page and serve/ anew: copy what you change.",
        *(paragraph for section in sections for paragraph in _section(section)),
    )
    return "\n\n".join(paragraphs) + "\n"


def _section(section: Section) -> tuple[str, ...]:
    return told(
        f"## {section.title}",
        f"Keys as of {section.title} {documented(section.engine).version}.",
        "\n".join(f"- {line}" for line in section.lines),
        section.needs and f"First:\n\n{_shell(section.needs)}",
        section.commands and _shell(section.commands),
        "\n".join(f"- `{file.path}`: {file.about}" for file in section.files),
        section.code and f"```python\n{section.code}```",
    )


def _shell(commands: Sequence[Command]) -> str:
    body = "\n".join(f"# {command.about}\n{command.line}" for command in commands)
    return f"```sh\n{body}\n```"
