"""A float GGUF file in llama.cpp's quantised types: `python -m makers.gguf_quantized FILE THREADS TYPE=OUT…`."""

import sys
from pathlib import Path

from makers.gguf_models import quantize

if __name__ == "__main__":
    chosen = dict(argument.split("=", 1) for argument in sys.argv[3:])
    quantize(Path(sys.argv[1]), {kind: Path(out) for kind, out in chosen.items()}, int(sys.argv[2]))
