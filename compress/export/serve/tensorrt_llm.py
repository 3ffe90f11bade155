"""TensorRT-LLM: `trtllm-serve` with its PyTorch backend, on NVIDIA GPUs."""

from typing import Any

from compress.export.serve import target
from compress.export.serve.parts import FOLDER, HOST, Command, ConfigFile, Section, Use, flags, keys
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "tensorrt_llm", "TensorRT-LLM", "tensorrt_llm"
PORT, CONTEXT_PORT, GENERATION_PORT = 8000, 8001, 8002
_OPTIONS = f"{FOLDER}/tensorrt-llm.yaml"
_CONTEXT, _GENERATION = f"{FOLDER}/tensorrt-llm-context.yaml", f"{FOLDER}/tensorrt-llm-generation.yaml"
_ROUTES = f"{FOLDER}/tensorrt-llm-disaggregated.yaml"


def section(facts: Facts) -> Section:
    """TensorRT-LLM's part of the page."""
    if facts.method is not None:
        said = (
            "Runs on NVIDIA GPUs only, and reads weights that are plain or were quantised by Model-Optimizer (FP8,"
            f" NVFP4, 4-bit AWQ with its hf_quant_config.json): not {target.contents(facts)}, and no export of it.",
        )
        return Section(KEY, TITLE, False, said)
    served = ("trtllm-serve", "./model", "--host", HOST, "--port", str(PORT), "--backend", "pytorch")
    commands = (
        Command("plain", served),
        Command("speculative", (*served, "--config", _OPTIONS)),
        Command("on several GPUs", (*served, *_parallel(facts))),
        Command("prefill of a pair that shares the work", _worker(CONTEXT_PORT, _CONTEXT)),
        Command("decode of the pair", _worker(GENERATION_PORT, _GENERATION)),
        Command("the server in front of the pair", ("trtllm-serve", "disaggregated", "-c", _ROUTES)),
    )
    files = (
        ConfigFile("speculative decoding", _OPTIONS, _alone(_speculative(facts))),
        ConfigFile(
            "the prefill server",
            _CONTEXT,
            {"disable_overlap_scheduler": True, "cache_transceiver_config": _transfer(facts)},
        ),
        ConfigFile("the decode server", _GENERATION, {"cache_transceiver_config": _transfer(facts)}),
        ConfigFile("the server in front of both", _ROUTES, _routes()),
    )
    return Section(KEY, TITLE, True, tuple(_lines(facts)), (), commands, files)


def _worker(port: int, config: str) -> tuple[str, ...]:
    return ("trtllm-serve", "./model", "--host", HOST, "--port", str(port), "--backend", "pytorch", "--config", config)


def _parallel(facts: Facts) -> tuple[str, ...]:
    words = ("--tp_size", str(facts.tensor_parallel), "--pp_size", str(facts.pipeline_parallel))
    return (*words, *(("--ep_size", str(facts.tensor_parallel)) if facts.experts else ()))


def _speculative(facts: Facts) -> dict[str, Any]:
    if target.drafts(facts):
        return {"decoding_type": "Draft_Target", "max_draft_len": facts.length, "speculative_model": "./draft"}
    longest = target.longest_ngram()
    return {"decoding_type": "NGram", "max_draft_len": facts.length, "max_matching_ngram_size": longest}


def _alone(speculative: dict[str, Any]) -> dict[str, Any]:
    # Drafting on the host cannot overlap with the next step's scheduling.
    return {"speculative_config": speculative, "disable_overlap_scheduler": True}


def _transfer(facts: Facts) -> dict[str, Any]:
    # The buffer is to hold the longest prompt.
    return {"backend": "DEFAULT", "max_tokens_in_buffer": facts.positions}


def _routes() -> dict[str, Any]:
    servers = {"context_servers": CONTEXT_PORT, "generation_servers": GENERATION_PORT}
    routes: dict[str, Any] = {"hostname": HOST, "port": PORT, "backend": "pytorch"}
    return routes | {name: {"num_instances": 1, "urls": [f"{HOST}:{port}"]} for name, port in servers.items()}


def _lines(facts: Facts) -> list[str]:
    said = [
        "Runs on NVIDIA GPUs only. Speculation does not go with pipeline parallelism, and pays at small batches.",
        "The servers of a pair want GPUs of their own: start them with different CUDA_VISIBLE_DEVICES.",
    ]
    if facts.cache is not None:
        said.append(f"Keys and values are not kept in {facts.cache} here: the scheme is our runtime's.")
    if facts.declared:
        said.append(
            "config.json names compressed-tensors for the cache's scales; where that is refused, serve a copy of model/"
            " without its quantization_config."
        )
    if facts.medusa:
        said.append("The PyTorch backend takes no Medusa heads: the run's are not used.")
    return said + target.drafting_lines(facts)


def uses(section: Section) -> list[Use]:
    """Every option of the section's commands and every key of its files."""
    used: list[Use] = []
    for command in section.commands:
        apart = command.words[1] == "disaggregated"
        used += flags(command.words, "disaggregated_flags" if apart else "flags")
    for file in section.files:
        apart = "context_servers" in file.content
        used += keys("disaggregated" if apart else "options", file.content)
        for name in ("context_servers", "generation_servers"):
            used += keys("servers", file.content.get(name))
        used += keys("cache_transceiver_config", file.content.get("cache_transceiver_config"))
        speculative = file.content.get("speculative_config", {})
        used += keys("speculative_config", speculative)
        used += [("decoding_type", speculative["decoding_type"])] if speculative else []
    return used


def installed() -> dict[str, frozenset[str]]:
    """The options and keys that the installed TensorRT-LLM's command and configuration classes accept."""
    from tensorrt_llm.commands.serve import serve
    from tensorrt_llm.llmapi import llm_args

    drafting = (llm_args.DraftTargetDecodingConfig, llm_args.NGramDecodingConfig)
    aliases = {field.alias for kind in drafting for field in kind.model_fields.values() if field.alias}
    return {
        "flags": frozenset(option for parameter in serve.params for option in parameter.opts),
        "options": frozenset(llm_args.TorchLlmArgs.model_fields),
        "speculative_config": frozenset(name for kind in drafting for name in kind.model_fields) | aliases,
        "cache_transceiver_config": frozenset(llm_args.CacheTransceiverConfig.model_fields),
        "decoding_type": frozenset(kind.model_fields["decoding_type"].default for kind in drafting),
    }
