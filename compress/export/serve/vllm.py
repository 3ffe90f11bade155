"""vLLM: `vllm serve`, on GPUs and, for some formats, on CPUs."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from compress.errors import UserError
from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import HOST, Command, Section, compact
from compress.export.serve.run_facts import Facts, read

KEY, TITLE, PACKAGE = "vllm", "vLLM", "vllm"
_LONGEST = 600  # seconds that it may take to load a model
PORT, PREFILL_PORT, DECODE_PORT = 8000, 8100, 8200
ACCEPTED = frozenset({None, "compressed-tensors", "gptq", "awq"})
# Forms with the same codes, the one that keeps zero points and activation order in every kernel first.
_FORMS = ("compressed-tensors", "gptq", "awq")
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
TABLES = {
    "--speculative-config": "speculative_config",
    "method": "method",
    "--kv-transfer-config": "kv_transfer_config",
}


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
    looked_up = {"prompt_lookup_min": 1, "prompt_lookup_max": target.longest_ngram()}
    return {"method": "ngram", "num_speculative_tokens": facts.length, **looked_up}


def section(facts: Facts) -> Section:
    found = source(facts)
    if found is None:
        return Section(KEY, TITLE, lines(facts, found))
    # "./": a bare folder name of two parts would be taken for a model of the hub.
    serve = f"vllm serve ./{found.path} --served-model-name {facts.name} --host {HOST} --port"
    sizes = f"--tensor-parallel-size {facts.tensor_parallel} --pipeline-parallel-size {facts.pipeline_parallel}"
    experts = "--enable-expert-parallel" if facts.experts else ""
    transfer = f"--kv-transfer-config {compact(TRANSFER)}"
    commands = (
        Command("plain", f"{serve} {PORT}"),
        Command("speculative", f"{serve} {PORT} --speculative-config {compact(speculative_config(facts))}"),
        Command("on several GPUs", f"{serve} {PORT} {sizes} {experts}"),
        Command("prefill of a pair that shares the work (NIXL)", f"{serve} {PREFILL_PORT} {transfer}"),
        Command("decode of a pair that shares the work (NIXL)", f"{serve} {DECODE_PORT} {transfer}"),
    )
    return Section(KEY, TITLE, lines(facts, found), target.needs(found), commands)


def lines(facts: Facts, found: target.Source | None) -> tuple[str, ...]:
    """What of this run vLLM, and Ray Serve above it, does not load, and where it runs."""
    weights = told(
        facts.method == "bitsandbytes"
        and "bitsandbytes is not among the quantisation methods of this version of vLLM; earlier ones read it on GPUs"
        " only, and none on CPUs.",
        facts.method == "bitnet"
        and "vLLM has no bitnet: ternary weights take 4 bits each in the export that stands in for them.",
        f"vLLM knows caches of 8-bit floats only and stops at this model's {facts.cache} kv_cache_scheme: model/"
        " itself is not loaded."
        if facts.declared
        else target.float_cache_line(facts),
    )
    if found is None:
        instead = "serve the original" if not facts.kinds else "compress with an int4 or int8 recipe"
        return (
            *weights,
            f"So vLLM reads no form of this model: {instead}, or take another engine. (A GGUF needs the package"
            " vllm-gguf-plugin, and a GPU.)",
        )
    return told(
        *weights,
        _on_cpus(facts, found),
        facts.medusa and "vLLM took Medusa heads until 0.12 and no longer does: the run's heads are not used.",
        *target.drafting_lines(facts),
        facts.experts and "Experts are spread over the tensor-parallel GPUs (--enable-expert-parallel).",
        target.one_part_line(facts),
        "Prefill and decode on different GPUs need a router in front that hands requests on; Ray Serve (below) brings"
        " one. Start the two with different CUDA_VISIBLE_DEVICES and VLLM_NIXL_SIDE_CHANNEL_PORT.",
    )


def _on_cpus(facts: Facts, found: target.Source) -> str | None:
    if not facts.kinds:
        return None
    if "fp8" in facts.kinds:
        return "Runs on GPUs: fp8 weights beside plain inputs are not among its documented formats for CPUs."
    if "int6" in facts.kinds or ("int4" in facts.kinds and facts.bits != (4,)):
        return "On CPUs vLLM has kernels for weights of 4 bits and for int8 with int8 inputs only, so not for these."
    if found.path.endswith(("gptq", "awq")) or facts.kinds == {"int4"}:
        return "Runs on GPUs, and on x86 CPUs (4 bits; sizes in multiples of 32)."
    return "Runs on GPUs, and on CPUs (int8 with int8 inputs)."


def installed() -> dict[str, frozenset[str]]:
    """The keys that the installed vLLM accepts, by its own parser and configuration classes."""
    import argparse
    import dataclasses
    from typing import get_args

    from vllm.config import KVTransferConfig, SpeculativeConfig
    from vllm.config import speculative as module
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    # Where its parser is from 0.33 on, in 0.32, and before that.
    places = [f"vllm.entrypoints.{room}.cli_args" for room in ("common", "launchers", "openai")]
    make_arg_parser = next(import_module(one) for one in places if _is_there(one)).make_arg_parser
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


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def load(run: Path) -> str | None:
    """How the installed vLLM loads what a run has for it, in a process of its own; None where it reads no form of it.

    Raises UserError where it does not load it.
    """
    found = source(read(run))
    if found is None:
        return None
    # What a text of 64 tokens needs of a CPU's memory; otherwise vLLM takes half of it. GPUs do not look at it.
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "compress.export.serve.vllm_load", str(run / found.path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env={**os.environ, **small}, timeout=_LONGEST
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"vLLM: expected that it loads {found.path} within {_LONGEST} s, found that it does not"
        ) from None
    told = [line for line in done.stdout.splitlines() if line.startswith('{"build"')]
    if done.returncode or not told:
        said = [line.strip() for line in done.stderr.splitlines() if "Error" in line] or ["it says nothing"]
        raise UserError(f"vLLM: expected that it loads {found.path}, found {said[-1][:200]}")
    loaded = json.loads(told[-1])
    return f"vLLM: {found.path} is loaded by {loaded['build']}, which wrote {loaded['tokens']} tokens with it"
