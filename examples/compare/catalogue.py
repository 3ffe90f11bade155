"""Which engines are compared, scheme by scheme, and what each of them runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """One column of a comparison.

    name    as tables print it.
    worker  module in workers/.
    peer    runs in the peers' environment; False: in ours.
    model   name of the model among the shape's models; "" for ours, which is written anew for each run.
    bound   why it cannot be held to fewer instructions than the processor has; "": it can.
    """

    name: str
    worker: str
    peer: bool
    model: str
    bound: str = ""


_OPENVINO = "its products of compressed weights ask the processor what it has"
OURS = Engine("specpress", "specpress", False, "")


def _llama_cpp(kind: str) -> Engine:
    return Engine(f"llama.cpp {kind}", "llama_cpp", True, f"{kind}.gguf")


def _openvino(scheme: str, bound: str = "") -> Engine:
    return Engine(f"OpenVINO {scheme}", "openvino_engine", True, f"openvino-{scheme}", bound)


def llama_bench(kind: str) -> Engine:
    """A GGUF model in a llama-bench binary that the user names."""
    return Engine(f"llama-bench {kind}", "llama_bench", False, f"{kind}.gguf")


GGUF = {"int4": ("Q4_0", "Q4_K_M"), "int8": ("Q8_0",), "ternary": ("TQ2_0",), "nf4": ()}
SCHEMES: dict[str, tuple[Engine, ...]] = {
    "int4": (OURS, *map(_llama_cpp, GGUF["int4"]), _openvino("int4", _OPENVINO)),
    "int8": (OURS, *map(_llama_cpp, GGUF["int8"]), _openvino("int8", _OPENVINO)),
    "ternary": (OURS, *map(_llama_cpp, GGUF["ternary"])),
    "nf4": (OURS, Engine("bitsandbytes nf4", "bitsandbytes_engine", False, "bitsandbytes-nf4")),
}
TITLES = {
    "int4": "int4: ours in groups of 128, OpenVINO's too, Q4_0 and Q4_K_M as llama.cpp has them",
    "int8": "int8",
    "ternary": "ternary (bitnet.cpp could not be run)",
    "nf4": "nf4: bitsandbytes through transformers",
}
