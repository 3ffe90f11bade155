"""An NF4 double-quantised target and a small full-precision draft: one prompt, with and without speculation.

    python examples/nf4_target_with_draft.py
    python examples/nf4_target_with_draft.py --target meta-llama/Llama-2-13b-hf \
        --draft TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T --prompt "Tell me about gravity."
"""

import argparse
import time

from compress import Recipe, compress
from compress.model.source import default_pair
from runtime import Speculator, load
from runtime.sampling.params import Sampling

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", help="a model directory or hub name; default: the embedded pair's target")
parser.add_argument("--draft", help="the same for the draft, which must share the target's vocabulary")
parser.add_argument("--prompt", default='def read_config(path):\n    """')
parser.add_argument("--out", default="runs/nf4-example", help="where the compressed target is written")
parser.add_argument("--max-new-tokens", type=int, default=96)
given = parser.parse_args()

pair = default_pair()
source, proposer = (given.target, given.draft) if given.target else (str(pair[0]), str(pair[1]))
artifact = compress(source, Recipe.load("nf4"), out=given.out, draft=proposer, speed=False, force=True)
target, draft = load(artifact.model), load(proposer)

for title, sampling in (
    ("greedy", Sampling()),
    ("sampled, temperature 0.8, seed 1", Sampling(temperature=0.8, seed=1)),
):
    texts = []
    for speculator in (Speculator(target), Speculator(target, draft, draft_length=4)):
        began, text, tokens = time.perf_counter(), "", 0
        for piece in speculator.stream(given.prompt, sampling=sampling, max_new_tokens=given.max_new_tokens):
            text += piece.text
            tokens += len(piece.tokens)
        texts.append((text, tokens / (time.perf_counter() - began)))
    (plain, plain_speed), (speculative, speculative_speed) = texts
    print(f"== {title}: {plain_speed:.0f} tokens/s alone, {speculative_speed:.0f} with the draft, ", end="")
    print("same text" if plain == speculative else "DIFFERENT TEXT")
    print(given.prompt + speculative, end="\n\n")
