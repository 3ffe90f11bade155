"""An export run once, where it was made: ONNX Runtime's logits of a few tokens beside our decoder's."""

from importlib.util import find_spec
from pathlib import Path

import torch

from compress.errors import USER_ERRORS
from runtime import load, native
from runtime.contract import Decoder, Rows

TOKENS = 8
# ‖difference‖ / ‖ours‖ of a token's logits, each token a text of its own, the least of all tokens: where both compute
# alike a token whose inputs are all rounded alike has float32's error, and only some tokens are others. Measured on
# both models of the pair: int4, and int8 per token and static, at most 2e-7; int8 with sums of pairs held to 16 bits,
# as x86 without VNNI adds unsigned times signed, 0.010 to 0.021; ternary, rounded in other groups, 0.009 and 0.011.
ALIKE = 1e-3
# The same of one text's logits together: 0.014 to 0.035 with such sums, 0.013 and 0.014 with other groups, 0.011 where
# few inputs were rounded the other way. Above ALIKE saturating sums are not told from these; other weights are.
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
    return judged(ours, theirs)


def judged(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """The sentence for two results of `logits`."""
    whole, size = theirs - ours, torch.linalg.vector_norm(ours, dim=1)
    found = float(torch.linalg.vector_norm(whole[:TOKENS]) / torch.linalg.vector_norm(size[:TOKENS]))
    least = float((torch.linalg.vector_norm(whole, dim=1) / size)[TOKENS:].min())
    place = "with" if any(native.usable(path)[0] for path in native.PATHS if path.endswith("vnni")) else "without"
    where = f"ONNX Runtime on this machine (a processor {place} VNNI)"
    measured = f"run by {where}, its logits of {TOKENS} tokens are {found:.2g} from the artifact's, relative"
    if not found <= BOUND:
        return f"wrong here: {measured}, and at most {BOUND} is expected: do not use it on such a machine"
    alone = f"the nearest of them, each alone, {least:.2g}"
    if least <= ALIKE:
        return f"checked: {measured}, {alone}: both compute alike"
    return (
        f"checked in part: {measured}, and {alone}; inputs that are rounded otherwise make that much, and so would sums"
        " that saturate"
    )


def logits(decoder: Decoder) -> torch.Tensor:
    """(2 TOKENS, V) of the vocabulary's first tokens, as one text, then each alone; the very first often ends texts."""
    tokens, cache = torch.arange(1, TOKENS + 1) % decoder.vocab_size, decoder.new_cache()
    alone = [(cache.open(1), 0, 1) for _ in range(TOKENS)]
    rows = Rows.chains([(cache.open(TOKENS), 0, TOKENS), *alone])
    return decoder.forward(tokens.repeat(2), rows, cache).logits.cpu()
