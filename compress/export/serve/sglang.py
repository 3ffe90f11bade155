"""SGLang: `python -m sglang.launch_server`."""

from compress.export.serve import target
from compress.export.serve.parts import HOST, Command, Section, Use, flags
from compress.export.serve.run_facts import Facts

KEY, TITLE, PACKAGE = "sglang", "SGLang", "sglang"
PORT, PREFILL_PORT, DECODE_PORT, ROUTER_PORT = 30000, 30001, 30002, 30000
_BOOTSTRAP = 8998
_ACCEPTED = frozenset({None, "compressed-tensors", "gptq", "awq", "bitsandbytes"})
_FORMS = ("compressed-tensors", "gptq", "awq")
_ON_CPUS = frozenset({None, "compressed-tensors", "gptq", "awq"})


def section(facts: Facts) -> Section:
    """SGLang's part of the page."""
    found = target.target(facts, _ACCEPTED, _FORMS)
    if found is None:
        return Section(KEY, TITLE, False, tuple(_lines(facts, found)))
    start = _serve(facts, found, PORT)
    commands = [
        Command("plain", start),
        Command("speculative", (*start, *_speculative(facts))),
        Command("on several GPUs", (*start, *_parallel(facts))),
    ]
    for role, port in (("prefill", PREFILL_PORT), ("decode", DECODE_PORT)):
        split = ("--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl")
        extra = ("--disaggregation-bootstrap-port", str(_BOOTSTRAP)) if role == "prefill" else ("--base-gpu-id", "1")
        commands.append(
            Command(f"{role} of a pair that shares the work", (*_serve(facts, found, port), *split, *extra))
        )
    commands.append(Command("the router in front of the pair (package sglang-router)", _router()))
    return Section(KEY, TITLE, True, tuple(_lines(facts, found)), target.needs(found), tuple(commands))


def _serve(facts: Facts, found: target.Source, port: int) -> tuple[str, ...]:
    served = ("python", "-m", "sglang.launch_server", "--model-path", f"./{found.path}", "--served-model-name")
    return (*served, facts.name, "--host", HOST, "--port", str(port))


def _speculative(facts: Facts) -> tuple[str, ...]:
    # SGLang counts the tokens of a verification: γ drafted ones and the one before them.
    width = str(facts.length + 1)
    if not target.drafts(facts):
        return ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", width)
    words = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "./draft")
    chain = ("--speculative-num-steps", str(facts.length), "--speculative-eagle-topk", "1")
    # Said, as the draft would otherwise be taken to be quantised as the target is.
    return (
        *words,
        *chain,
        "--speculative-num-draft-tokens",
        width,
        "--speculative-draft-model-quantization",
        "unquant",
    )


def _parallel(facts: Facts) -> tuple[str, ...]:
    words = ("--tp-size", str(facts.tensor_parallel), "--pp-size", str(facts.pipeline_parallel))
    return (*words, *(("--ep-size", str(facts.tensor_parallel)) if facts.experts else ()))


def _router() -> tuple[str, ...]:
    words = ("python", "-m", "sglang_router.launch_router", "--pd-disaggregation")
    prefill = ("--prefill", f"http://{HOST}:{PREFILL_PORT}", str(_BOOTSTRAP))
    decode = ("--decode", f"http://{HOST}:{DECODE_PORT}")
    return (*words, *prefill, *decode, "--host", HOST, "--port", str(ROUTER_PORT))


def _lines(facts: Facts, found: target.Source | None) -> list[str]:
    said = []
    if facts.method == "bitnet":
        said.append("SGLang has no bitnet: ternary weights take 4 bits each in the export that stands in for them.")
    if facts.declared:
        said.append(f"The {facts.cache} kv_cache_scheme is ignored with a warning: keys and values stay in floats.")
    elif facts.cache is not None:
        said.append(f"Keys and values are not kept in {facts.cache} here: the scheme is our runtime's.")
    if found is None:
        said.append("So SGLang reads no form of this model: compress with another recipe, or take another engine.")
        return said
    if found.path == "model" and facts.method not in _ON_CPUS:
        said.append("bitsandbytes (and GGUF) run on GPUs only: SGLang's CPU methods leave them out.")
    elif "fp8" in facts.kinds:
        said.append("Runs on GPUs.")
    elif facts.kinds:
        said.append(
            "Runs on GPUs; on CPUs with AMX, with --device cpu, where verification is by argmax whatever is sampled."
        )
    if facts.medusa:
        said.append("SGLang takes no Medusa heads: the run's are not used.")
    said += target.drafting_lines(facts)
    if facts.tensor_parallel == 1:
        said.append("Heads or groups of weights cannot be cut in two, so tensor parallelism stays at 1.")
    return said


def uses(section: Section) -> list[Use]:
    """Every option of the section's commands, and the names given to some."""
    used: list[Use] = []
    for command in section.commands:
        router = "sglang_router.launch_router" in command.words
        options = flags(command.words[3:], "router_flags" if router else "flags")
        words = dict(zip(command.words, command.words[1:], strict=False))
        named = {"--speculative-algorithm": "algorithm", "--disaggregation-mode": "disaggregation_mode"}
        used += options + [(table, words[flag]) for flag, table in named.items() if flag in words]
    return used


def installed() -> dict[str, frozenset[str]]:
    """The options that the installed SGLang's own parser accepts."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {"flags": frozenset(parser._option_string_actions)}
