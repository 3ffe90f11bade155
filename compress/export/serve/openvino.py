"""OpenVINO GenAI: a Python pipeline on CPUs, and Intel's GPUs and NPUs."""

from typing import Any

from compress.export.serve import target
from compress.export.serve.parts import FOLDER, Command, ConfigFile, Section, Use, keys
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "openvino", "OpenVINO GenAI", "openvino_genai"
_CONFIG = f"{FOLDER}/openvino.json"
_TARGET, _DRAFT = f"{FOLDER}/openvino/target", f"{FOLDER}/openvino/draft"
_DEVICE = "CPU"
# What its GGUF reader knows: of architectures, and of types those that our weights become.
_GGUF_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
_GGUF_KINDS = frozenset({"int4", "int8", "nf4"})

_CODE = """import json
import openvino_genai as ov

config = json.load(open("{path}"))
options = config["pipeline"]
given = {{key: options[key] for key in ("prompt_lookup",) if key in options}}
if "draft_model" in options:
    given["draft_model"] = ov.draft_model(options["draft_model"], options["device"])
pipeline = ov.LLMPipeline(options["models_path"], options["device"], **given)
generation = ov.GenerationConfig(**config["generation_config"])
print(pipeline.generate("Tell me about gravity.", generation))
"""


def section(facts: Facts) -> Section:
    """OpenVINO GenAI's part of the page."""
    if facts.method is None:
        return _converted(facts)
    if facts.model_type in _GGUF_FAMILIES and facts.kinds <= _GGUF_KINDS:
        return _gguf(facts)
    said = (
        f"OpenVINO GenAI reads OpenVINO's own format and GGUF of {', '.join(sorted(_GGUF_FAMILIES))} without ternary"
        f" weights: not {target.contents(facts)} of a {facts.model_type}. Convert the original with optimum-cli.",
    )
    return Section(KEY, TITLE, False, said)


def _converted(facts: Facts) -> Section:
    pipeline: dict[str, Any] = {"models_path": _TARGET, "device": _DEVICE}
    needs = [_convert("model", _TARGET, "the target")]
    if target.drafts(facts):
        pipeline["draft_model"] = _DRAFT
        needs.append(_convert("draft", _DRAFT, "the draft"))
    else:
        pipeline["prompt_lookup"] = True
    said = [
        "Plain weights are converted by optimum-intel (in an environment of its own), as they are: --weight-format int8"
        " or int4 would round them once more.",
    ]
    if facts.declared:
        said.append("Take quantization_config out of a copy of config.json first: it names the cache's scales only.")
    return _section(facts, pipeline, needs, said)


def _gguf(facts: Facts) -> Section:
    found = target.exported(facts, "gguf", file="model.gguf")
    pipeline = {"models_path": found.path, "device": _DEVICE, "prompt_lookup": True}
    said = ["Quantised weights come as GGUF, and a GGUF has no draft here: n-grams of the prompt draft."]
    return _section(facts, pipeline, list(target.needs(found)), said)


def _section(facts: Facts, pipeline: dict[str, Any], needs: list[Command], said: list[str]) -> Section:
    generation: dict[str, Any] = {"max_new_tokens": 128, "num_assistant_tokens": facts.length}
    if pipeline.get("prompt_lookup"):
        generation["max_ngram_size"] = target.longest_ngram()
    said.append(
        "Greedy only (its default): with sampling its draft models do not keep the target's distribution, which prompt"
        " lookup does."
    )
    if facts.cache is not None:
        said.append(f"Keys and values are in OpenVINO's own 8-bit form, not in the run's {facts.cache}.")
    if facts.medusa:
        said.append("OpenVINO GenAI takes no Medusa heads: the run's are not used.")
    said += target.drafting_lines(facts)
    file = ConfigFile("the pipeline", _CONFIG, {"pipeline": pipeline, "generation_config": generation})
    return Section(KEY, TITLE, True, tuple(said), tuple(needs), (), (file,), _CODE.format(path=_CONFIG))


def _convert(source: str, out: str, what: str) -> Command:
    words = ("optimum-cli", "export", "openvino", "--model", f"./{source}", "--task", "text-generation-with-past")
    return Command(f"{what} in OpenVINO's format", (*words, out))


def uses(section: Section) -> list[Use]:
    """The keys of the pipeline's file, and the functions that the code calls."""
    used: list[Use] = [("functions", name) for name in ("LLMPipeline", "draft_model", "GenerationConfig")]
    for file in section.files:
        used += keys("pipeline", file.content["pipeline"])
        used += keys("generation_config", file.content["generation_config"])
    return used


def installed() -> dict[str, frozenset[str]]:
    """What the installed package's classes and functions are called."""
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    return {
        "functions": frozenset(dir(openvino_genai)),
        "generation_config": frozenset(name for name in dir(settings) if not name.startswith("_")),
    }
