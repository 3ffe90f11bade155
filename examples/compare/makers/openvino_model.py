"""An OpenVINO export: `python -m makers.openvino_model CHECKPOINT OUT int4|int8|float16`.

The tokenizer, where the checkpoint has one, comes along as OpenVINO runs it: a pipeline wants it, even where token ids
go in and come out.
"""

import sys
from pathlib import Path


def make(checkpoint: Path, out: Path, scheme: str) -> None:
    """int8: the exporter's default. int4: symmetric, groups of 128, every layer; the head and the table stay int8.
    float16: nothing is compressed."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = {
        "int8": OVWeightQuantizationConfig(bits=8),
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
        "float16": None,
    }[scheme]
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, quantization_config=config)
    model.save_pretrained(out)
    if (checkpoint / "tokenizer.json").is_file():
        _write_tokenizer(checkpoint, out)


def _write_tokenizer(checkpoint: Path, out: Path) -> None:
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    pair = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    for name, graph in zip(("openvino_tokenizer.xml", "openvino_detokenizer.xml"), pair, strict=True):
        openvino.save_model(graph, out / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
