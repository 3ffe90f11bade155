"""A program: loads a model in vLLM, writes a few tokens, and says so as one line of JSON, the last one that it prints.

python -m compress.export.serve.vllm_load RUN/model
"""

import json
import sys


def main() -> None:
    """Loads it without compiling anything, for one short text."""
    from importlib.metadata import packages_distributions, version

    from vllm import LLM, SamplingParams

    model = LLM(model=sys.argv[1], enforce_eager=True, max_model_len=64, max_num_seqs=1, disable_log_stats=True)
    found = model.generate(
        [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    )
    build = packages_distributions()["vllm"][0]  # vllm, or another name of a build for CPUs
    print(json.dumps({"build": f"{build} {version(build)}", "tokens": len(found[0].outputs[0].token_ids)}), flush=True)


if __name__ == "__main__":  # vLLM starts processes that import this file again
    main()
