"""TensorRT-LLM: `trtllm-serve` with its PyTorch backend, on NVIDIA GPUs."""

from typing import Any

from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import FOLDER, HOST, Command, ConfigFile, Section
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "tensorrt_llm", "TensorRT-LLM", "tensorrt_llm"
PORT, CONTEXT_PORT, GENERATION_PORT = 8000, 8001, 8002
_OPTIONS = f"{FOLDER}/tensorrt-llm.yaml"
_CONTEXT, _GENERATION = f"{FOLDER}/tensorrt-llm-context.yaml", f"{FOLDER}/tensorrt-llm-generation.yaml"
_ROUTES = f"{FOLDER}/tensorrt-llm-disaggregated.yaml"


TABLES = {
    "context_servers": "servers",
    "generation_servers": "servers",
    "cache_transceiver_config": "cache_transceiver_config",
    "speculative_config": "speculative_config",
    "decoding_type": "decoding_type",
}


def section(facts: Facts) -> Section:
    if facts.method is not None:
        said = (
            "Runs on NVIDIA GPUs only, and reads weights that are plain or were quantised by Model-Optimizer (FP8,"
            f" NVFP4, 4-bit AWQ with its hf_quant_config.json): not {target.contents(facts)}, and no export of it.",
        )
        return Section(KEY, TITLE, said)

    def serve(port: int, config: str = "") -> str:
        return f"trtllm-serve ./model --host {HOST} --port {port} --backend pytorch {config and '--config ' + config}"

    sizes = f"--tp_size {facts.tensor_parallel} --pp_size {facts.pipeline_parallel}"
    experts = f"--ep_size {facts.tensor_parallel}" if facts.experts else ""
    commands = (
        Command("plain", serve(PORT)),
        Command("speculative", serve(PORT, _OPTIONS)),
        Command("on several GPUs", f"{serve(PORT)} {sizes} {experts}"),
        Command("prefill of a pair that shares the work", serve(CONTEXT_PORT, _CONTEXT)),
        Command("decode of the pair", serve(GENERATION_PORT, _GENERATION)),
        Command("the server in front of the pair", f"trtllm-serve disaggregated -c {_ROUTES}", "disaggregated_flags"),
    )
    # Neither drafting on the host nor a server of prefills alone can overlap with the next step's scheduling.
    alone = {"disable_overlap_scheduler": True}
    # The buffer is to hold the longest prompt.
    transfer = {"cache_transceiver_config": {"backend": "DEFAULT", "max_tokens_in_buffer": facts.positions}}
    options = {"": "options"}
    servers = {"context_servers": CONTEXT_PORT, "generation_servers": GENERATION_PORT}
    routes: dict[str, Any] = {"hostname": HOST, "port": PORT, "backend": "pytorch"}
    routes |= {name: {"num_instances": 1, "urls": [f"{HOST}:{port}"]} for name, port in servers.items()}
    files = (
        ConfigFile("speculative decoding", _OPTIONS, {"speculative_config": _speculative(facts)} | alone, options),
        ConfigFile("the prefill server", _CONTEXT, alone | transfer, options),
        ConfigFile("the decode server", _GENERATION, transfer, options),
        ConfigFile("the server in front of both", _ROUTES, routes, {"": "disaggregated"}),
    )
    return Section(KEY, TITLE, _lines(facts), (), commands, files)


def _speculative(facts: Facts) -> dict[str, Any]:
    if target.drafts(facts):
        return {"decoding_type": "Draft_Target", "max_draft_len": facts.length, "speculative_model": "./draft"}
    longest = target.longest_ngram()
    return {"decoding_type": "NGram", "max_draft_len": facts.length, "max_matching_ngram_size": longest}


def _lines(facts: Facts) -> tuple[str, ...]:
    return told(
        "Runs on NVIDIA GPUs only. Speculation does not go with pipeline parallelism, and pays at small batches.",
        "The servers of a pair want GPUs of their own: start them with different CUDA_VISIBLE_DEVICES.",
        target.float_cache_line(facts),
        facts.declared
        and "config.json names compressed-tensors for the cache's scales; where that is refused, serve a copy of model/"
        " without its quantization_config.",
        facts.medusa and "The PyTorch backend takes no Medusa heads: the run's are not used.",
        *target.drafting_lines(facts),
    )


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
