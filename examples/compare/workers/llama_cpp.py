"""llama.cpp through its C interface: llama_decode of batches whose rows all ask for logits."""

import ctypes
from collections import Counter
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from workers.protocol import Description, Options, Tokens, serve


class LlamaCpp:
    """A GGUF model. Flash attention and the cache's type (f16) are the library's defaults."""

    def __init__(self, options: Options):
        llama_cpp.llama_backend_init()
        self.path, self.vocabulary = options.model, options.vocabulary
        self.system = llama_cpp.llama_print_system_info().decode()
        require_native(self.system, options.kernels)
        model = llama_cpp.llama_model_load_from_file(
            str(options.model).encode(), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {options.model.name}")
        settings = llama_cpp.llama_context_default_params()
        longest = max(options.prefill, 512)
        settings.n_ctx = longest + options.context + 64
        settings.n_batch = settings.n_ubatch = longest
        settings.n_threads = settings.n_threads_batch = options.threads
        settings.no_perf = True
        self.context = llama_cpp.llama_init_from_model(model, settings)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context for {options.model.name}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(longest, 0, 1)
        self.held: list[int] = []

    def describe(self) -> Description:
        """The tensors of the file without the embedding table, of which a forward reads a few rows."""
        tensors = gguf.GGUFReader(self.path).tensors
        untied = any(tensor.name == "output.weight" for tensor in tensors)
        read = [tensor for tensor in tensors if not (untied and tensor.name == "token_embd.weight")]
        kinds = Counter(tensor.tensor_type.name for tensor in read if len(tensor.shape) == 2)
        facts = {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "system": " ".join(self.system.split()),
            "threads": str(llama_cpp.llama_n_threads(self.context)),
            "matrices": ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        }
        return Description(sum(int(tensor.n_bytes) for tensor in read), facts)

    def restore(self, context: Tokens, width: int) -> None:
        """Removes what follows the context. The graph of the forward before is reused where the width is the same."""
        if self.held[: len(context)] != context.tolist():
            self.clear()
            self.forward(context, len(context) - 1)
        llama_cpp.llama_memory_seq_rm(self.memory, 0, len(context), -1)
        del self.held[len(context) :]

    def clear(self) -> None:
        """Removes the whole sequence."""
        llama_cpp.llama_memory_seq_rm(self.memory, 0, -1, -1)
        self.held.clear()

    def forward(self, tokens: Tokens, logits_from: int) -> NDArray[np.floating]:
        """One llama_decode, a logits flag on each of those rows."""
        batch, count = self.batch, len(tokens)
        batch.n_tokens = count
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, len(self.held) + i, 1, 0
            batch.logits[i] = i >= logits_from
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_synchronize(self.context)
        self.held += tokens.tolist()
        found = ctypes.cast(llama_cpp.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(found, (count - logits_from, self.vocabulary))


def require_native(system: str, kernels: str = "auto") -> None:
    """A generic build would lose for the wrong reason: RuntimeError where the processor's VNNI is left unused.

    kernels  "avx2": a build that uses AVX-512 would win for the wrong reason.
    """
    if kernels == "avx2":
        if "AVX512 = 1" in system or "AVX2 = 1" not in system:
            raise RuntimeError(
                f"llama.cpp was not built for AVX2 alone ({system}): make peers PEERS_CMAKE=…, see Makefile"
            )
        return
    cpu = Path("/proc/cpuinfo")
    if cpu.is_file() and "avx512_vnni" in cpu.read_text() and "AVX512_VNNI = 1" not in system:
        raise RuntimeError(f"llama.cpp was built without AVX512-VNNI, which this processor has ({system}): make peers")


if __name__ == "__main__":
    serve(LlamaCpp)
