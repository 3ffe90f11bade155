"""ONNX Runtime GenAI: a Python loop over exported ONNX graphs."""

import json
import tempfile
from pathlib import Path
from typing import Any

from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import FOLDER, ConfigFile, Section, documented
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "onnxruntime", "ONNX Runtime GenAI", "onnxruntime_genai"
_FORMS = ("onnx", "onnx-fp16")
_CONFIG = f"{FOLDER}/onnxruntime-genai.json"
# What the library takes.
_LONGEST_DRAFT, _NGRAMS = 16, (2, 16)

_CODE = """import json
import onnxruntime_genai as og

options = json.load(open("{path}"))
config = og.Config("{folder}")
{overlay}model = og.Model(config)
tokenizer = og.Tokenizer(model)
tokens = tokenizer.encode("Tell me about gravity.")
params = og.GeneratorParams(model)
params.set_search_options(max_length=len(tokens) + 128, do_sample=False)
params.set_speculative_options(**options["speculative"])
generator = og.Generator(model, params)
generator.append_tokens(tokens)
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
"""
_OVERLAY = """draft = json.load(open("{folder}/genai_config.json"))["model"]["decoder"]
draft["filename"] = "{up}{folder}/" + draft["filename"]
config.overlay(json.dumps({{"model": {{"draft": draft}}}}))
"""


TABLES = {"speculative": "speculative"}
_OVERLAY_USES = (("top", "model"), ("model", "draft"), ("decoder", "filename"))


def section(facts: Facts) -> Section:
    if "fp8" in facts.kinds:
        said = "ONNX Runtime GenAI runs ONNX graphs only, and fp8 weights are not exported to it."
        return Section(KEY, TITLE, (said,))
    found = target.exported(facts, *_FORMS)
    options: dict[str, Any] = {"max_draft_tokens": min(facts.length, _LONGEST_DRAFT)}
    draft, overlay = None, ""
    if target.drafts(facts):
        draft = target.exported(facts, found.path.removeprefix("exports/"), draft=True)
        overlay = _OVERLAY.format(folder=draft.path, up="../" * (found.path.count("/") + 1))
    else:
        low, high = _NGRAMS
        # It counts the token that follows a match, too.
        options |= {"ngram_size": min(max(target.longest_ngram() + 1, low), high), "ngram_chained_lookup": True}
    lines = told(
        "Runs ONNX graphs only, one text at a time; `onnx` is the export for CPUs, `onnx-fp16` for GPUs. Target and"
        " draft must be the same of the two.",
        facts.cache and f"Keys and values are in floats, not in the run's {facts.cache}.",
        facts.medusa and "ONNX Runtime GenAI takes no Medusa heads: the run's are not used.",
        *target.drafting_lines(facts),
    )
    file = ConfigFile("how it drafts", _CONFIG, {"speculative": options}, {"": "top"})
    code = _CODE.format(path=_CONFIG, folder=found.path, overlay=overlay)
    needs = target.needs(found, draft)
    return Section(KEY, TITLE, lines, needs, (), (file,), code, _OVERLAY_USES if overlay else ())


def installed() -> dict[str, frozenset[str]]:
    """The keys that the installed library's own parser of genai_config.json takes, out of the documented ones.

    It has no list to read, so each key is given to it.
    """
    import onnxruntime_genai as og

    with tempfile.TemporaryDirectory() as folder:
        # The least that it loads.
        least = {"model": {"context_length": 1}, "search": {}}
        (Path(folder) / "genai_config.json").write_text(json.dumps(least), encoding="utf-8")
        config = og.Config(folder)
        known = {"speculative": documented(KEY).tables["speculative"]}
        return {table: frozenset(key for key in names if _taken(config, table, key)) for table, names in known.items()}


def _taken(config: Any, table: str, key: str) -> bool:
    for value in (2, False):
        try:
            config.overlay(json.dumps({table: {key: value}}))
        except Exception:  # the library raises its own kind for unknown keys and wrong types
            continue
        return True
    return False
