"""Which engines load a folder, by what its files say; our own is asked."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from compress.check.findings import Engine
from compress.check.layers import by_weight, read
from compress.check.opening import Opened
from compress.export.serve import llama_cpp, openvino, sglang, vllm
from compress.export.serve.parts import documented
from compress.export.serve.run_facts import packed
from runtime.checkpoints.architecture import describe
from runtime.errors import UserError
from runtime.formats.packed import PackedWeight

# What transformers needs to load a `quant_method`.
_LIBRARIES = {
    "gptq": ("gptqmodel", "optimum"),
    "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed_tensors",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "bitnet": (),
    "mxfp4": (),
    "fp8": (),
}


@dataclass(frozen=True)
class Facts:
    """What engines go by.

    method   `quant_method`; None: plain weights. bits, reordered, asymmetric: of config.json (compress.export.serve).
    broken   whether the check found something that keeps the model from being loaded as it is meant.
    """

    opened: Opened
    method: str | None
    model_type: str
    bits: tuple[int, ...]
    reordered: bool
    asymmetric: bool
    broken: bool

    @property
    def is_gguf(self) -> bool:
        return self.opened.header is not None


def check_engines(opened: Opened, broken: bool) -> list[Engine]:
    """One row for each engine. `broken`: the findings say that the weights are not what they should be."""
    said = packed(opened.quantization or {}) if opened.unread is None and opened.config else {}
    facts = Facts(
        opened,
        None if opened.form in ("plain", "GGUF") else opened.form,
        str(opened.text_config.get("model_type", "")),
        tuple(said.get("bits", ())),
        bool(said.get("reordered")),
        bool(said.get("asymmetric")),
        broken,
    )
    return [row(facts) for row in _ROWS]


def _row(name: str, loads: bool | None, why: str, facts: Facts) -> Engine:
    if loads and facts.broken:
        why = f"{why}; what is broken above stays broken there"
    return Engine(name=name, loads=loads, why=why)


def _transformers(facts: Facts) -> Engine:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    name = "transformers"
    if facts.is_gguf:
        why = "reads GGUF files only by dequantising them (gguf_file=), for some architectures"
        return _row(name, None, why, facts)
    if facts.opened.config.get("model_type") not in KNOWN and facts.model_type not in KNOWN:
        return _row(name, False, f"has no model_type {facts.model_type!r}", facts)
    if facts.method is None:
        return _row(name, True, "plain weights", facts)
    if facts.method in ("specpress-ternary", "specpress-trellis"):
        return _row(name, True, "after `import runtime.formats.transformers`", facts)
    if facts.method not in _LIBRARIES:
        return _row(name, None, f"depends on a library for {facts.method}", facts)
    if facts.method == "compressed-tensors" and facts.reordered:
        return _row(name, False, "compressed-tensors has no weight_g_idx since August 2026", facts)
    lacking = [library for library in _LIBRARIES[facts.method] if find_spec(library) is None]
    needs = ", ".join(_LIBRARIES[facts.method]) or "nothing else"
    more = f" (not installed here: {', '.join(lacking)})" if lacking else ""
    return _row(name, True, f"{facts.method}, with {needs}{more}", facts)


def _vllm(facts: Facts) -> Engine:
    name = f"vLLM {documented(vllm.KEY).version}"
    if facts.is_gguf:
        return _row(name, None, "reads GGUF with the package vllm-gguf-plugin, on GPUs", facts)
    if facts.method not in vllm.ACCEPTED:
        return _row(name, False, f"has no {facts.method}", facts)
    if facts.method == "awq" and facts.bits != (4,):
        return _row(name, False, "reads AWQ of 4 bits only", facts)
    if facts.reordered:
        return _row(name, True, f"{facts.method}; activation order has kernels on GPUs only", facts)
    return _row(name, True, facts.method or "plain weights", facts)


def _sglang(facts: Facts) -> Engine:
    name = f"SGLang {documented(sglang.KEY).version}"
    if facts.is_gguf:
        return _row(name, None, "reads some GGUF files (--load-format gguf)", facts)
    if facts.method not in sglang.ACCEPTED:
        return _row(name, False, f"has no {facts.method}", facts)
    return _row(name, True, facts.method or "plain weights", facts)


def _llama_cpp(facts: Facts) -> Engine:
    name = f"llama.cpp {documented(llama_cpp.KEY).version}"
    if not facts.is_gguf:
        return _row(name, False, "reads GGUF only: export to it", facts)
    return _row(name, True, "GGUF", facts)


def _openvino(facts: Facts) -> Engine:
    name = f"OpenVINO {documented(openvino.KEY).version}"
    if facts.is_gguf:
        known = facts.model_type in openvino.GGUF_FAMILIES
        families = ", ".join(sorted(openvino.GGUF_FAMILIES))
        return _row(name, known, "GGUF" if known else f"reads GGUF of {families} only", facts)
    if facts.method is None:
        return _row(name, True, "plain weights, once optimum-intel has converted them", facts)
    return _row(name, False, f"reads its own format and GGUF, not {facts.method}", facts)


def _ours(facts: Facts) -> Engine:
    """Asked: the configuration, and one packed layer by our reader."""
    name, opened = "Specpress", facts.opened
    if opened.unread is not None:
        return Engine(name=name, loads=False, why=opened.unread, asked=True)
    try:
        own = describe(opened.config) is not None if opened.config else False
        first = next((n for n, stored in by_weight(opened.tensors).items() if len(stored) > 1), None)
        weight = None if first is None else read(opened, first)
    except UserError as error:
        return Engine(name=name, loads=False, why=str(error), asked=True)
    if facts.is_gguf and not own:
        return Engine(name=name, loads=False, why="runs no GGUF of this architecture", asked=True)
    kernels = "its own kernels" if own else "transformers"
    kind = f", {weight.scheme.kind}" if isinstance(weight, PackedWeight) else ""
    why = f"runs on {kernels}{kind}"
    more = "; what is broken above stays broken there" if facts.broken else ""
    return Engine(name=name, loads=bool(opened.config), why=why + more, asked=True)


_ROWS: tuple[Callable[[Facts], Engine], ...] = (_transformers, _vllm, _sglang, _llama_cpp, _openvino, _ours)
