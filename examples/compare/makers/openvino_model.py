"""An OpenVINO export with compressed weights: `python -m makers.openvino_model CHECKPOINT OUT int4|int8`."""

import sys
from pathlib import Path


def make(checkpoint: Path, out: Path, scheme: str) -> None:
    """int8: the exporter's default. int4: symmetric, groups of 128, every layer; the head and the table stay int8."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    config = {
        "int8": OVWeightQuantizationConfig(bits=8),
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
    }[scheme]
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, quantization_config=config)
    model.save_pretrained(out)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
