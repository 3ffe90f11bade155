"""An export run once, where it was made: ONNX Runtime's logits of a few tokens beside our decoder's."""

from importlib.util import find_spec
from pathlib import Path

import torch

from compress.errors import USER_ERRORS
from runtime import load, native
from runtime.contract import Decoder, Rows

TOKENS = 8
# ‖difference‖ / ‖ours‖ of all logits. One input that is rounded the other way shows as thousandths, and operators that
# round inputs in other groups than our kernels as hundredths; products whose sums saturate as tenths and more.
BOUND = 0.1
# Both models are in memory at once: larger ones are left to who runs them.
MOST_BYTES = 4 << 30


def sentence(model: Path, out: Path, size: int) -> str:
    """What came of it: the error and its bound and where it was run, or why it was not; `size` are the weights' bytes.

    Nothing is raised for a model that cannot be run here: it may be meant for another machine.
    """
    if find_spec("onnxruntime") is None:
        return "not checked: ONNX Runtime, which would run it, is not installed here"
    if size > MOST_BYTES:
        return f"not checked: it and the artifact would take more than {2 * MOST_BYTES >> 30} GB of memory at once"
    try:
        ours, theirs = (logits(load(path).decoder) for path in (model, out))
    except USER_ERRORS as error:
        return f"not checked: {error}"
    found = float(torch.linalg.vector_norm(theirs - ours) / torch.linalg.vector_norm(ours))
    place = "with" if any(native.usable(path)[0] for path in native.PATHS if path.endswith("vnni")) else "without"
    where = f"ONNX Runtime on this machine (a processor {place} VNNI)"
    measured = f"run by {where}, its logits of {TOKENS} tokens are {found:.2g} from the artifact's, relative"
    if found <= BOUND:
        return f"checked: {measured} (at most {BOUND} is expected)"
    return f"wrong here: {measured}, and at most {BOUND} is expected: do not use it on such a machine"


def logits(decoder: Decoder) -> torch.Tensor:
    """(TOKENS, V) of the first tokens of the vocabulary but its very first, which often end texts."""
    tokens, cache = torch.arange(1, TOKENS + 1) % decoder.vocab_size, decoder.new_cache()
    return decoder.forward(tokens, Rows.chains([(cache.open(TOKENS), 0, TOKENS)]), cache).logits.cpu()
