"""SGLang: `python -m sglang.launch_server`."""

from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import HOST, Command, Section
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "sglang", "SGLang", "sglang"
PORT, PREFILL_PORT, DECODE_PORT, ROUTER_PORT = 30000, 30001, 30002, 30000
_BOOTSTRAP = 8998
ACCEPTED = frozenset({None, "compressed-tensors", "gptq", "awq", "bitsandbytes"})
_FORMS = ("compressed-tensors", "gptq", "awq")
TABLES = {"--speculative-algorithm": "algorithm", "--disaggregation-mode": "disaggregation_mode"}


def section(facts: Facts) -> Section:
    found = target.target(facts, ACCEPTED, _FORMS)
    if found is None:
        return Section(KEY, TITLE, _lines(facts, found))
    serve = f"python -m sglang.launch_server --model-path ./{found.path} --served-model-name {facts.name} --host {HOST}"
    sizes = f"--tp-size {facts.tensor_parallel} --pp-size {facts.pipeline_parallel}"
    experts = f"--ep-size {facts.tensor_parallel}" if facts.experts else ""
    part, nixl = "of a pair that shares the work", "--disaggregation-transfer-backend nixl"
    commands = (
        Command("plain", f"{serve} --port {PORT}"),
        Command("speculative", f"{serve} --port {PORT} {_speculative(facts)}"),
        Command("on several GPUs", f"{serve} --port {PORT} {sizes} {experts}"),
        Command(
            f"prefill {part}",
            f"{serve} --port {PREFILL_PORT} --disaggregation-mode prefill {nixl}"
            f" --disaggregation-bootstrap-port {_BOOTSTRAP}",
        ),
        Command(f"decode {part}", f"{serve} --port {DECODE_PORT} --disaggregation-mode decode {nixl} --base-gpu-id 1"),
        Command(
            "the router in front of the pair (package sglang-router)",
            f"python -m sglang_router.launch_router --pd-disaggregation --prefill http://{HOST}:{PREFILL_PORT}"
            f" {_BOOTSTRAP} --decode http://{HOST}:{DECODE_PORT} --host {HOST} --port {ROUTER_PORT}",
            table="router_flags",
        ),
    )
    return Section(KEY, TITLE, _lines(facts, found), target.needs(found), commands)


def _speculative(facts: Facts) -> str:
    # SGLang counts the tokens of a verification: γ drafted ones and the one before them.
    width = f"--speculative-num-draft-tokens {facts.length + 1}"
    if not target.drafts(facts):
        return f"--speculative-algorithm NGRAM {width}"
    # Said, as the draft would otherwise be taken to be quantised as the target is.
    plain = "--speculative-draft-model-quantization unquant"
    return (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path ./draft"
        f" --speculative-num-steps {facts.length} --speculative-eagle-topk 1 {width} {plain}"
    )


def _lines(facts: Facts, found: target.Source | None) -> tuple[str, ...]:
    weights = told(
        facts.method == "bitnet"
        and "SGLang has no bitnet: ternary weights take 4 bits each in the export that stands in for them.",
        f"The {facts.cache} kv_cache_scheme is ignored with a warning: keys and values stay in floats."
        if facts.declared
        else target.float_cache_line(facts),
    )
    if found is None:
        return (
            *weights,
            "So SGLang reads no form of this model: compress with another recipe, or take another engine.",
        )
    return told(
        *weights,
        _on_cpus(facts, found),
        facts.medusa and "SGLang takes no Medusa heads: the run's are not used.",
        *target.drafting_lines(facts),
        target.one_part_line(facts),
    )


def _on_cpus(facts: Facts, found: target.Source) -> str | None:
    if found.path == "model" and facts.method == "bitsandbytes":
        return "bitsandbytes (and GGUF) run on GPUs only: SGLang's CPU methods leave them out."
    if "fp8" in facts.kinds:
        return "Runs on GPUs."
    if not facts.kinds:
        return None
    return "Runs on GPUs; on CPUs with AMX, with --device cpu, where verification is by argmax whatever is sampled."


def installed() -> dict[str, frozenset[str]]:
    """The options that the installed SGLang's own parser accepts."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {"flags": frozenset(parser._option_string_actions)}
