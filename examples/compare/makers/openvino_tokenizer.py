"""A checkpoint's tokenizer as OpenVINO runs it: `python -m makers.openvino_tokenizer CHECKPOINT OUT`.

OUT is the folder of the exported model; a pipeline wants both there, even where token ids go in and come out.
"""

import sys
from pathlib import Path


def make(checkpoint: Path, out: Path) -> None:
    """Writes openvino_tokenizer.xml and openvino_detokenizer.xml."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    pair = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    for name, graph in zip(("openvino_tokenizer.xml", "openvino_detokenizer.xml"), pair, strict=True):
        openvino.save_model(graph, out / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
