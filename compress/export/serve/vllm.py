"""vLLM: `vllm serve`, on GPUs and, for some formats, on CPUs."""

import json
from typing import Any

from compress.export.serve import target
from compress.export.serve.parts import HOST, Command, Section, Use, compact, flags, keys
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "vllm", "vLLM", "vllm"
PORT, PREFILL_PORT, DECODE_PORT = 8000, 8100, 8200
ACCEPTED = frozenset({None, "compressed-tensors", "gptq", "awq"})
# Forms with the same codes, the one that keeps zero points and activation order in every kernel first.
_FORMS = ("compressed-tensors", "gptq", "awq")
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def source(facts: Facts) -> target.Source | None:
    """What vLLM is given as the target; None where it reads no form of it."""
    if facts.declared:
        # vLLM stops at an integer kv_cache_scheme; GPTQ's and AWQ's configs have no place for one.
        return target.target(facts, (), ("gptq", "awq")) if facts.kinds else None
    return target.target(facts, ACCEPTED, _FORMS)


def speculative_config(facts: Facts) -> dict[str, Any]:
    """`--speculative-config` for this draft and γ."""
    if target.drafts(facts):
        return {"method": "draft_model", "model": "./draft", "num_speculative_tokens": facts.length}
    longest = target.longest_ngram()
    return {
        "method": "ngram",
        "num_speculative_tokens": facts.length,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": longest,
    }


def section(facts: Facts) -> Section:
    """vLLM's part of the page."""
    found = source(facts)
    if found is None:
        return Section(KEY, TITLE, False, tuple(lines(facts, found)))
    commands = [
        Command("plain", (*_serve(facts, found, PORT),)),
        Command(
            "speculative",
            (*_serve(facts, found, PORT), "--speculative-config", compact(speculative_config(facts))),
        ),
        Command("on several GPUs", (*_serve(facts, found, PORT), *_parallel(facts))),
    ]
    for role, port in (("prefill", PREFILL_PORT), ("decode", DECODE_PORT)):
        words = (*_serve(facts, found, port), "--kv-transfer-config", compact(TRANSFER))
        commands.append(Command(f"{role} of a pair that shares the work (NIXL)", words))
    return Section(KEY, TITLE, True, tuple(lines(facts, found)), target.needs(found), tuple(commands))


def _serve(facts: Facts, found: target.Source, port: int) -> tuple[str, ...]:
    # "./": a bare folder name of two parts would be taken for a model of the hub.
    served = ("vllm", "serve", f"./{found.path}", "--served-model-name", facts.name)
    return (*served, "--host", HOST, "--port", str(port))


def _parallel(facts: Facts) -> tuple[str, ...]:
    words = ("--tensor-parallel-size", str(facts.tensor_parallel), "--pipeline-parallel-size")
    return (*words, str(facts.pipeline_parallel), *(("--enable-expert-parallel",) if facts.experts else ()))


def lines(facts: Facts, found: target.Source | None) -> list[str]:
    """What of this run vLLM, and Ray Serve above it, does not load, and where it runs."""
    said = []
    if facts.method == "bitsandbytes":
        said.append(
            "bitsandbytes is not among the quantisation methods of this version of vLLM; earlier ones read it on GPUs"
            " only, and none on CPUs."
        )
    if facts.method == "bitnet":
        said.append("vLLM has no bitnet: ternary weights take 4 bits each in the export that stands in for them.")
    if facts.declared:
        said.append(
            f"vLLM knows caches of 8-bit floats only and stops at this model's {facts.cache} kv_cache_scheme: model/"
            " itself is not loaded."
        )
    elif facts.cache is not None:
        said.append(f"Keys and values are not kept in {facts.cache} here: the scheme is our runtime's.")
    if found is None:
        instead = "serve the original" if not facts.kinds else "compress with an int4 or int8 recipe"
        said.append(
            f"So vLLM reads no form of this model: {instead}, or take another engine. (A GGUF needs the package"
            " vllm-gguf-plugin, and a GPU.)"
        )
        return said
    said += _on_cpus(facts, found)
    if facts.medusa:
        said.append("vLLM took Medusa heads until 0.12 and no longer does: the run's heads are not used.")
    said += target.drafting_lines(facts)
    if facts.experts:
        said.append("Experts are spread over the tensor-parallel GPUs (--enable-expert-parallel).")
    if facts.tensor_parallel == 1:
        said.append("Heads or groups of weights cannot be cut in two, so tensor parallelism stays at 1.")
    said.append(
        "Prefill and decode on different GPUs need a router in front that hands requests on; Ray Serve (below) brings"
        " one. Start the two with different CUDA_VISIBLE_DEVICES and VLLM_NIXL_SIDE_CHANNEL_PORT."
    )
    return said


def _on_cpus(facts: Facts, found: target.Source) -> list[str]:
    if not facts.kinds:
        return []
    if "fp8" in facts.kinds:
        return ["Runs on GPUs: fp8 weights beside plain inputs are not among its documented formats for CPUs."]
    if "int4" in facts.kinds and facts.bits != (4,):
        return ["On CPUs vLLM has kernels for weights of 4 bits and for int8 with int8 inputs only, so not for these."]
    if found.path.endswith(("gptq", "awq")) or facts.kinds == {"int4"}:
        return ["Runs on GPUs, and on x86 CPUs (4 bits; sizes in multiples of 32)."]
    return ["Runs on GPUs, and on CPUs (int8 with int8 inputs)."]


def uses(section: Section) -> list[Use]:
    """Every key of the section's commands."""
    used: list[Use] = []
    for command in section.commands:
        used += flags(command.words)
        words = dict(zip(command.words, command.words[1:], strict=False))
        used += speculative_uses(json.loads(words.get("--speculative-config", "{}")))
        used += keys("kv_transfer_config", json.loads(words.get("--kv-transfer-config", "{}")))
    return used


def speculative_uses(config: dict[str, Any]) -> list[Use]:
    """The keys of a speculative configuration, and its method."""
    return keys("speculative_config", config) + ([("method", str(config["method"]))] if "method" in config else [])


def installed() -> dict[str, frozenset[str]]:
    """The keys that the installed vLLM accepts, by its own parser and configuration classes."""
    import argparse
    import dataclasses
    from typing import get_args

    from vllm.config import KVTransferConfig, SpeculativeConfig
    from vllm.config import speculative as module
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # until 0.2x
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
    parser: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    fields = {AsyncEngineArgs: "engine_kwargs", SpeculativeConfig: "speculative_config"}
    fields |= {KVTransferConfig: "kv_transfer_config"}
    found = {name: frozenset(f.name for f in dataclasses.fields(kind)) for kind, name in fields.items()}
    found["engine_kwargs"] |= frozenset(f.name for f in dataclasses.fields(EngineArgs))
    found["flags"] = frozenset(parser._option_string_actions)
    found["method"] = frozenset(get_args(module.SpeculativeMethod))
    return found
