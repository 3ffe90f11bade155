"""llama.cpp: `llama-server`, and the server of its Python binding, on CPUs and GPUs."""

import re
import shutil
import subprocess

from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import FOLDER, HOST, Command, ConfigFile, Section
from compress.export.serve.run_facts import Facts
from runtime.checkpoints.gguf.names import ARCHITECTURES

KEY, TITLE, PACKAGE = "llama_cpp", "llama.cpp", "llama_cpp"
PORT = 8080
_PROGRAM = "llama-server"
_CONFIG = f"{FOLDER}/llama-cpp-python.json"
_FORM, _FILE = "gguf", "model.gguf"
# llama.cpp's types of caches that are nearest to ours.
# llama.cpp has no cache of three bits.
_CACHES = {"int8": "q8_0", "int4": "q4_0", "int3": "q4_0"}
_SECONDS = 20
TABLES = {"--spec-type": "spec_type", "models": "models"}


def section(facts: Facts) -> Section:
    if facts.model_type not in ARCHITECTURES:
        said = f"llama.cpp reads GGUF only, and models of type {facts.model_type!r} are not exported to it."
        return Section(KEY, TITLE, (said,))
    if "fp8" in facts.kinds:
        return Section(KEY, TITLE, ("llama.cpp reads GGUF only, and fp8 weights are not exported to it.",))
    found = target.exported(facts, _FORM, file=_FILE)
    draft = target.exported(facts, _FORM, file=_FILE, draft=True) if target.drafts(facts) else None
    kind = _CACHES.get(facts.cache or "")
    cache = f"--cache-type-k {kind} --cache-type-v {kind} --flash-attn on" if kind else ""
    serve = f"{_PROGRAM} --model {found.path} --alias {facts.name} --host {HOST} --port {PORT} {cache}"
    if draft is not None:
        speculative = f"--model-draft {draft.path} --spec-type draft-simple --spec-draft-n-max {facts.length}"
    else:
        sizes = f"--spec-ngram-simple-size-n {target.longest_ngram()} --spec-ngram-simple-size-m {facts.length}"
        speculative = f"--spec-type ngram-simple {sizes}"
    commands = (
        Command("plain", serve),
        Command("speculative", f"{serve} {speculative}"),
        Command("the Python binding's server", f"python -m llama_cpp.server --config_file {_CONFIG}", table=""),
    )
    binding = {
        "model": found.path,
        "model_alias": facts.name,
        "n_ctx": facts.positions,
        "draft_model": "prompt-lookup-decoding",
        "draft_model_num_pred_tokens": facts.length,
    }
    about = "the Python binding's server, drafting by prompt lookup"
    file = ConfigFile(about, _CONFIG, {"host": HOST, "port": PORT, "models": [binding]}, {"": "server"})
    return Section(KEY, TITLE, _lines(facts), target.needs(found, draft), commands, (file,))


def _lines(facts: Facts) -> tuple[str, ...]:
    return told(
        "llama.cpp reads GGUF only. Put layers on GPUs with --n-gpu-layers (and --spec-draft-ngl for the draft).",
        facts.kinds
        and "What the export keeps exactly and what it rounds again stands in its export.json and in the report.",
        facts.cache
        and f"{_CACHES[facts.cache]} is llama.cpp's own rounding of keys and values, not the run's {facts.cache}.",
        facts.medusa and "llama.cpp takes no Medusa heads: the run's are not used.",
        "Some of its kernels give other bits at other widths, so speculative text can differ from plain text.",
        *target.drafting_lines(facts),
    )


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
