"""llama.cpp: `llama-server`, and the server of its Python binding, on CPUs and GPUs."""

import re
import shutil
import subprocess

from compress.export.serve import target
from compress.export.serve.parts import FOLDER, HOST, Command, ConfigFile, Section, Use, flags, keys
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "llama_cpp", "llama.cpp", "llama_cpp"
PORT = 8080
_PROGRAM = "llama-server"
_CONFIG = f"{FOLDER}/llama-cpp-python.json"
_FORM, _FILE = "gguf", "model.gguf"
_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe"})
# llama.cpp's types of caches that are nearest to ours.
_CACHES = {"int8": "q8_0", "int4": "q4_0"}
_SECONDS = 20


def section(facts: Facts) -> Section:
    """llama.cpp's part of the page."""
    if facts.model_type not in _FAMILIES:
        said = f"llama.cpp reads GGUF only, and models of type {facts.model_type!r} are not exported to it."
        return Section(KEY, TITLE, False, (said,))
    if "fp8" in facts.kinds:
        return Section(KEY, TITLE, False, ("llama.cpp reads GGUF only, and fp8 weights are not exported to it.",))
    found = target.exported(facts, _FORM, file=_FILE)
    named = (_PROGRAM, "--model", found.path, "--alias", facts.name)
    served = (*named, "--host", HOST, "--port", str(PORT), *_cache(facts))
    draft = target.exported_draft(facts, _FORM, file=_FILE) if target.drafts(facts) else None
    commands = (
        Command("plain", served),
        Command("speculative", (*served, *_speculative(facts, draft))),
        Command("the Python binding's server", ("python", "-m", "llama_cpp.server", "--config_file", _CONFIG)),
    )
    binding = {
        "model": found.path,
        "model_alias": facts.name,
        "n_ctx": facts.positions,
        "draft_model": "prompt-lookup-decoding",
        "draft_model_num_pred_tokens": facts.length,
    }
    file = ConfigFile(
        "the Python binding's server, drafting by prompt lookup",
        _CONFIG,
        {"host": HOST, "port": PORT, "models": [binding]},
    )
    return Section(KEY, TITLE, True, tuple(_lines(facts)), target.needs(found, draft), commands, (file,))


def _cache(facts: Facts) -> tuple[str, ...]:
    kind = _CACHES.get(facts.cache or "")
    return () if kind is None else ("--cache-type-k", kind, "--cache-type-v", kind, "--flash-attn", "on")


def _speculative(facts: Facts, draft: target.Source | None) -> tuple[str, ...]:
    if draft is not None:
        return ("--model-draft", draft.path, "--spec-type", "draft-simple", "--spec-draft-n-max", str(facts.length))
    words = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(target.longest_ngram()))
    return (*words, "--spec-ngram-simple-size-m", str(facts.length))


def _lines(facts: Facts) -> list[str]:
    said = ["llama.cpp reads GGUF only. Put layers on GPUs with --n-gpu-layers (and --spec-draft-ngl for the draft)."]
    if facts.kinds:
        said.append(
            "What the export keeps exactly and what it rounds again stands in its export.json and in the report."
        )
    if facts.cache is not None:
        said.append(
            f"{_CACHES[facts.cache]} is llama.cpp's own rounding of keys and values, not the run's {facts.cache}."
        )
    if facts.medusa:
        said.append("llama.cpp takes no Medusa heads: the run's are not used.")
    said.append("Some of its kernels give other bits at other widths, so speculative text can differ from plain text.")
    return said + target.drafting_lines(facts)


def uses(section: Section) -> list[Use]:
    """Every option of llama-server's commands, and the keys of the binding's file."""
    used: list[Use] = []
    for command in section.commands:
        if command.words[0] != _PROGRAM:
            continue
        used += flags(command.words)
        words = dict(zip(command.words, command.words[1:], strict=False))
        used += [("spec_type", words["--spec-type"])] if "--spec-type" in words else []
    for file in section.files:
        used += keys("server", file.content)
        for model in file.content["models"]:
            used += keys("models", model)
    return used


def installed() -> dict[str, frozenset[str]]:
    """The options that an installed llama-server names in its help, and the binding's settings where it is there.

    Raises ImportError where neither is installed.
    """
    found: dict[str, frozenset[str]] = {}
    if (program := shutil.which(_PROGRAM)) is not None:
        text = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
        found["flags"] = frozenset(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))
    try:
        from llama_cpp.server.settings import ConfigFileSettings, ModelSettings
    except ImportError:
        if not found:
            raise
        return found
    found["models"] = frozenset(ModelSettings.model_fields)
    found["server"] = frozenset(ConfigFileSettings.model_fields)
    return found
