"""Run by tests in the peers' environment: `python llama_cpp_logits.py MODEL GIVEN.json OUT`.

Writes the logits of every position of each list of tokens to OUT/N.npy, and the ids that llama.cpp gives for the texts
to OUT/ids.json; with no tokens nothing but the vocabulary is loaded. The cache is float32, without flash attention.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

GGML_TYPE_F32 = 0
FLASH_ATTENTION_DISABLED = 0


def main(file: Path, given: dict[str, Any], out: Path) -> None:
    llama_cpp.llama_backend_init()
    settings = llama_cpp.llama_model_default_params()
    settings.vocab_only = not given["tokens"]
    # Blocks are multiplied as they lie in the file. Virtual machines announce AMX and then kill what uses it.
    settings.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {file.name}")
    ids = [_tokenized(llama_cpp.llama_model_get_vocab(model), text.encode()) for text in given["texts"]]
    (out / "ids.json").write_text(json.dumps(ids))
    for number, tokens in enumerate(given["tokens"]):
        np.save(out / f"{number}.npy", _logits(model, tokens, given["vocabulary"]))


def _tokenized(vocabulary: Any, text: bytes) -> list[int]:
    most = len(text) + 8
    found = (llama_cpp.llama_token * most)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), found, most, False, True)
    if count < 0:
        raise RuntimeError("llama_tokenize failed")
    return list(found[:count])


def _logits(model: Any, tokens: list[int], vocabulary: int) -> np.ndarray:
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(tokens)
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = GGML_TYPE_F32
    settings.flash_attn_type = FLASH_ATTENTION_DISABLED
    context = llama_cpp.llama_init_from_model(model, settings)
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, True
    if llama_cpp.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    rows = ctypes.cast(llama_cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
    found = np.ctypeslib.as_array(rows, (len(tokens), vocabulary)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
