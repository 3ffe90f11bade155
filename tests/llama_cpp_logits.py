"""Run by tests in the peers' environment: `python llama_cpp_logits.py MODEL GIVEN.json OUT`.

Writes the logits of every position of each list of tokens to OUT/N.npy, and the ids that llama.cpp gives for the texts
to OUT/ids.json; with no tokens nothing but the vocabulary is loaded. The cache is float32, without flash attention.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

GGML_TYPE_F32 = 0


def main(model: str, file: Path, out: Path) -> None:
    given = json.loads(file.read_text())
    longest = max(map(len, given["tokens"]), default=0)
    llm = llama_cpp.Llama(
        model,
        vocab_only=not given["tokens"],
        n_ctx=longest + 1,
        n_batch=longest + 1,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        type_k=GGML_TYPE_F32,
        type_v=GGML_TYPE_F32,
        flash_attn=False,
        verbose=False,
    )
    for number, tokens in enumerate(given["tokens"]):
        llm.reset()
        llm.eval(tokens)
        np.save(out / f"{number}.npy", np.array(llm.scores[: len(tokens)], np.float32))
    ids = [llm.tokenize(text.encode(), add_bos=False, special=True) for text in given["texts"]]
    (out / "ids.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
