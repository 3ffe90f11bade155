"""Ray Serve LLM: replicas of vLLM behind one address, described in YAML."""

from collections.abc import Mapping
from typing import Any

from compress.export.serve import target, vllm
from compress.export.serve.parts import FOLDER, HOST, Command, ConfigFile, Section, documented
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "ray_serve", "Ray Serve LLM", "ray"
PORT = 8000
REPLICAS = 2
_SPECULATIVE = f"{FOLDER}/ray.yaml"
_PARALLEL = f"{FOLDER}/ray-parallel.yaml"
_SPLIT = f"{FOLDER}/ray-prefill-decode.yaml"
_OPENAI, _PAIR = "ray.serve.llm:build_openai_app", "ray.serve.llm:build_pd_openai_app"


_TABLES = {
    "": "deploy",
    "http_options": "http_options",
    "applications": "application",
    "import_path": "import_path",
    "args": "llm_args",
}
TABLES = dict.fromkeys(("llm_configs", "prefill_config", "decode_config"), "llm_config") | {
    "model_loading_config": "model_loading_config",
    "deployment_config": "deployment_config",
    "engine_kwargs": "engine_kwargs",
    "speculative_config": "speculative_config",
    "method": "method",
    "kv_transfer_config": "kv_transfer_config",
}


def section(facts: Facts) -> Section:
    found = vllm.source(facts)
    if found is None:
        return Section(KEY, TITLE, vllm.lines(facts, found))

    def model(**engine: Any) -> dict[str, Any]:
        return {
            "model_loading_config": {"model_id": facts.name, "model_source": f"./{found.path}"},
            "engine_kwargs": engine,
            "deployment_config": {"num_replicas": REPLICAS},
        }

    sizes = {"tensor_parallel_size": facts.tensor_parallel, "pipeline_parallel_size": facts.pipeline_parallel}
    experts = {"enable_expert_parallel": True} if facts.experts else {}
    one = {"llm_configs": [model(speculative_config=vllm.speculative_config(facts))]}
    cut = {"llm_configs": [model(**sizes, **experts)]}
    pair = {f"{role}_config": model(kv_transfer_config=vllm.TRANSFER) for role in ("prefill", "decode")}
    files = (
        _file(f"{REPLICAS} replicas that decode speculatively", _SPECULATIVE, _OPENAI, one),
        _file(f"{REPLICAS} replicas, each over several GPUs", _PARALLEL, _OPENAI, cut),
        _file("prefill and decode on different GPUs", _SPLIT, _PAIR, pair, "pd_args"),
    )
    commands = tuple(Command(file.about, f"serve run {file.path}") for file in files)
    said = (
        "Ray's workers look for ./model where Ray was started: start it in the run folder, on every machine, or write"
        " full paths. Its engine is vLLM, so what is said of vLLM holds.",
        "accelerator_type is left out: add the GPU's name as Ray knows it where machines differ.",
        "Prefill and decode pass keys and values on by NIXL (package nixl).",
    )
    return Section(KEY, TITLE, said, target.needs(found), commands, files)


def _file(about: str, path: str, builder: str, args: Mapping[str, Any], table: str = "llm_args") -> ConfigFile:
    application = {"name": "specpress", "route_prefix": "/", "import_path": builder, "args": args}
    content = {"http_options": {"host": HOST, "port": PORT}, "applications": [application]}
    return ConfigFile(about, path, content, _TABLES | {"args": table})


def tables() -> dict[str, frozenset[str]]:
    """The documented tables that are vLLM's."""
    return {name: table for name, table in documented(vllm.KEY).tables.items() if name != "flags"}


def installed() -> dict[str, frozenset[str]]:
    """The keys that the installed Ray's schemas accept; those of its LLM part where its engine is installed, too."""
    from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

    schemas = {"deploy": ServeDeploySchema, "application": ServeApplicationSchema, "http_options": HTTPOptionsSchema}
    try:
        from ray.serve.llm import LLMConfig, LLMServingArgs, ModelLoadingConfig
    except ImportError:  # it imports vLLM or SGLang
        pass
    else:
        schemas |= {"llm_args": LLMServingArgs, "llm_config": LLMConfig, "model_loading_config": ModelLoadingConfig}
    return {name: frozenset(schema.model_fields) for name, schema in schemas.items()}
