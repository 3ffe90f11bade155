"""llama-cpp-python: `Llama.generate`, plain or with its prompt lookup. (It has no draft models.)"""

from itertools import islice

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from workers.generation import Options, serve
from workers.llama_cpp import require_native


class LlamaCpp:
    """A GGUF model behind the library's own sampling loop; n-grams, flash attention and cache type as it has them."""

    def __init__(self, options: Options):
        if options.drafter == "model":
            raise ValueError("llama-cpp-python has no drafter of that kind")
        self.lookup = LlamaPromptLookupDecoding() if options.drafter == "lookup" else None
        self.model = llama_cpp.Llama(
            str(options.target),
            n_ctx=options.positions,
            n_batch=options.positions,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            draft_model=self.lookup,
            no_perf=True,
            verbose=False,
        )
        self.system = llama_cpp.llama_print_system_info().decode()
        require_native(self.system)

    def describe(self) -> dict[str, str]:
        """Version and build."""
        facts = {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "system": " ".join(self.system.split()),
            "threads": str(self.model.n_threads),
        }
        if self.lookup is not None:
            facts["n-grams"] = f"up to {self.lookup.max_ngram_size} tokens"
        return facts

    def generate(self, prompt: list[int], new_tokens: int, draft_length: int | None) -> list[int]:
        """Greedy (temperature 0); the cache is emptied first, since a prompt that comes again would not be read."""
        if self.lookup is not None:
            if draft_length is None:
                raise ValueError("a draft length is needed")
            self.lookup.num_pred_tokens = draft_length
        self.model.reset()
        return list(islice(self.model.generate(prompt, temp=0.0), new_tokens))


if __name__ == "__main__":
    serve(LlamaCpp)
