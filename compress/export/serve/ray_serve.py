"""Ray Serve LLM: replicas of vLLM behind one address, described in YAML."""

from collections.abc import Mapping
from typing import Any

from compress.export.serve import target, vllm
from compress.export.serve.parts import FOLDER, HOST, Command, ConfigFile, Section, Use, documented, keys
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "ray_serve", "Ray Serve LLM", "ray"
PORT = 8000
REPLICAS = 2
_SPECULATIVE = f"{FOLDER}/ray.yaml"
_PARALLEL = f"{FOLDER}/ray-parallel.yaml"
_SPLIT = f"{FOLDER}/ray-prefill-decode.yaml"
_OPENAI, _PAIR = "ray.serve.llm:build_openai_app", "ray.serve.llm:build_pd_openai_app"


def section(facts: Facts) -> Section:
    """Ray Serve's part of the page."""
    found = vllm.source(facts)
    if found is None:
        return Section(KEY, TITLE, False, tuple(vllm.lines(facts, found)))
    speculative = {"speculative_config": vllm.speculative_config(facts)}
    transfer = {"kv_transfer_config": dict(vllm.TRANSFER)}
    one, cut = (
        {"llm_configs": [_model(facts, found, speculative)]},
        {"llm_configs": [_model(facts, found, _sizes(facts))]},
    )
    pair = {f"{role}_config": _model(facts, found, transfer) for role in ("prefill", "decode")}
    files = (
        ConfigFile(f"{REPLICAS} replicas that decode speculatively", _SPECULATIVE, _deployment(_OPENAI, one)),
        ConfigFile(f"{REPLICAS} replicas, each over several GPUs", _PARALLEL, _deployment(_OPENAI, cut)),
        ConfigFile("prefill and decode on different GPUs", _SPLIT, _deployment(_PAIR, pair)),
    )
    commands = tuple(Command(file.about, ("serve", "run", file.path)) for file in files)
    said = [
        "Ray's workers look for ./model where Ray was started: start it in the run folder, on every machine, or write"
        " full paths. Its engine is vLLM, so what is said of vLLM holds.",
        "accelerator_type is left out: add the GPU's name as Ray knows it where machines differ.",
        "Prefill and decode pass keys and values on by NIXL (package nixl).",
    ]
    return Section(KEY, TITLE, True, tuple(said), target.needs(found), commands, files)


def _model(facts: Facts, found: target.Source, engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_loading_config": {"model_id": facts.name, "model_source": f"./{found.path}"},
        "engine_kwargs": dict(engine),
        "deployment_config": {"num_replicas": REPLICAS},
    }


def _sizes(facts: Facts) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "tensor_parallel_size": facts.tensor_parallel,
        "pipeline_parallel_size": facts.pipeline_parallel,
    }
    return sizes | ({"enable_expert_parallel": True} if facts.experts else {})


def _deployment(path: str, args: Mapping[str, Any]) -> dict[str, Any]:
    application = {"name": "specpress", "route_prefix": "/", "import_path": path, "args": dict(args)}
    return {"http_options": {"host": HOST, "port": PORT}, "applications": [application]}


def uses(section: Section) -> list[Use]:
    """Every key of the section's files."""
    used: list[Use] = []
    for file in section.files:
        used += keys("deploy", file.content) + keys("http_options", file.content["http_options"])
        for application in file.content["applications"]:
            args = application["args"]
            used += [*keys("application", application), ("import_path", application["import_path"])]
            used += keys("pd_args" if "prefill_config" in args else "llm_args", args)
            for model in args.get("llm_configs") or args.values():
                used += _model_uses(model)
    return used


def _model_uses(model: Mapping[str, Any]) -> list[Use]:
    engine = model["engine_kwargs"]
    used = keys("llm_config", model) + keys("model_loading_config", model["model_loading_config"])
    used += keys("deployment_config", model["deployment_config"]) + keys("engine_kwargs", engine)
    used += vllm.speculative_uses(engine.get("speculative_config", {}))
    return used + keys("kv_transfer_config", engine.get("kv_transfer_config"))


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
