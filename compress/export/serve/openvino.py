"""OpenVINO GenAI: a Python pipeline on CPUs, and Intel's GPUs and NPUs."""

from typing import Any

from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import FOLDER, Command, ConfigFile, Section
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "openvino", "OpenVINO GenAI", "openvino_genai"
_CONFIG = f"{FOLDER}/openvino.json"
_TARGET, _DRAFT = f"{FOLDER}/openvino/target", f"{FOLDER}/openvino/draft"
_DEVICE = "CPU"
# What its GGUF reader knows: of architectures, and of types those that our weights become.
GGUF_FAMILIES = frozenset({"llama", "qwen2", "qwen3"})
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


TABLES = {"pipeline": "pipeline", "generation_config": "generation_config"}
_CODE_USES = tuple(("functions", name) for name in ("LLMPipeline", "draft_model", "GenerationConfig"))


def section(facts: Facts) -> Section:
    pipeline: dict[str, Any]
    if facts.method is None:
        pipeline = {"models_path": _TARGET, "device": _DEVICE}
        needs: tuple[Command, ...] = (_convert("model", _TARGET, "the target"),)
        if target.drafts(facts):
            pipeline["draft_model"] = _DRAFT
            needs += (_convert("draft", _DRAFT, "the draft"),)
        else:
            pipeline["prompt_lookup"] = True
        said = told(
            "Plain weights are converted by optimum-intel (in an environment of its own), as they are: --weight-format"
            " int8 or int4 would round them once more.",
            facts.declared
            and "Take quantization_config out of a copy of config.json first: it names the cache's scales only.",
        )
    elif facts.model_type in GGUF_FAMILIES and facts.kinds <= _GGUF_KINDS:
        found = target.exported(facts, "gguf", file="model.gguf")
        pipeline = {"models_path": found.path, "device": _DEVICE, "prompt_lookup": True}
        needs = target.needs(found)
        said = ("Quantised weights come as GGUF, and a GGUF has no draft here: n-grams of the prompt draft.",)
    else:
        families = ", ".join(sorted(GGUF_FAMILIES))
        said = (
            f"OpenVINO GenAI reads OpenVINO's own format and GGUF of {families} without ternary weights: not"
            f" {target.contents(facts)} of a {facts.model_type}. Convert the original with optimum-cli.",
        )
        return Section(KEY, TITLE, said)
    lookup = {"max_ngram_size": target.longest_ngram()} if "prompt_lookup" in pipeline else {}
    generation = {"max_new_tokens": 128, "num_assistant_tokens": facts.length} | lookup
    lines = told(
        *said,
        "Greedy only (its default): with sampling its draft models do not keep the target's distribution, which prompt"
        " lookup does.",
        facts.cache and f"Keys and values are in OpenVINO's own 8-bit form, not in the run's {facts.cache}.",
        facts.medusa and "OpenVINO GenAI takes no Medusa heads: the run's are not used.",
        *target.drafting_lines(facts),
    )
    file = ConfigFile("the pipeline", _CONFIG, {"pipeline": pipeline, "generation_config": generation})
    return Section(KEY, TITLE, lines, needs, (), (file,), _CODE.format(path=_CONFIG), _CODE_USES)


def _convert(source: str, out: str, what: str) -> Command:
    words = f"optimum-cli export openvino --model ./{source} --task text-generation-with-past {out}"
    return Command(f"{what} in OpenVINO's format", words)


def installed() -> dict[str, frozenset[str]]:
    """What the installed package's classes and functions are called."""
    import openvino_genai

    settings = openvino_genai.GenerationConfig()
    return {
        "functions": frozenset(dir(openvino_genai)),
        "generation_config": frozenset(name for name in dir(settings) if not name.startswith("_")),
    }
