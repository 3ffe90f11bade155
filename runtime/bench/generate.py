"""transformers' `generate` beside our decoders: the same shape, prompt and number of tokens, in interleaved rounds."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from runtime.bench.device_models import random_model
from runtime.bench.measure import Bench
from runtime.bench.shapes import SHAPES
from runtime.bench.speculate import Item, Job, Way, run_once
from runtime.contract import Decoder
from runtime.model.layers import described
from runtime.sampling.params import Sampling
from runtime.speculative.draft import NoDrafter


def time_ways(bench: Bench, shape: str, schemes: Sequence[str], prompt: int, new_tokens: int) -> None:
    """Rows: tokens/s of each way, the prompt's time included.

    transformers runs in bfloat16. All decode greedily, exactly so many tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    place, say = bench.place, bench.say
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SHAPES[shape].architecture.vocab, (prompt,), generator=draws)
    say(f"making {shape} for transformers")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SHAPES[shape].config, "tie_word_embeddings": False})
    with place.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    compiled = "transformers, static cache + compile" if place.is_gpu else "transformers, static cache"
    tasks = {
        "transformers, eager": place.task(_generate(model, ids, new_tokens, {})),
        # generate compiles static caches' steps by itself where there is an accelerator.
        compiled: place.task(_generate(model, ids, new_tokens, {"cache_implementation": "static"})),
    }
    for scheme in schemes:
        say(f"making {shape}, {scheme}")
        ours = random_model(shape, scheme, place.device, bench.kernels, "keep" if scheme == "bf16" else "int8")
        tasks[f"specpress ({described(ours.decoder)}), {scheme}"] = place.task(_ours(ours.decoder, ids, new_tokens))
    say("timing; the first texts compile")
    for way in list(tasks):
        try:
            tasks[way]()
        except Exception as error:  # a compiler's failure, of many classes, is a finding about that way
            del tasks[way]
            bench.leave_out(error, way=way)
    base = None
    for way, samples in bench.samples(tasks).items():
        seconds = median(sample.seconds for sample in samples)
        base = seconds if base is None else base
        bench.rows.append(
            {
                "shape": shape, "way": way, "prompt": prompt, "new_tokens": new_tokens,
                "tokens_per_second": new_tokens / seconds, "ms_per_token": seconds / new_tokens * 1e3,
                "over_eager": base / seconds,
            }
        )  # fmt: skip


def _generate(model: Any, ids: torch.Tensor, new_tokens: int, options: dict[str, Any]) -> Callable[[], Any]:
    given = ids.view(1, -1).to(model.device)

    def run() -> Any:
        return model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            **options,
        )

    return run


def _ours(decoder: Decoder, ids: torch.Tensor, new_tokens: int) -> Callable[[], Any]:
    nothing = NoDrafter()
    job = Job(decoder, nothing, (Item(ids.tolist(), "random tokens"),), new_tokens, 1, Sampling(), "coupled", 0)
    way = Way(nothing, 0, decoder.new_cache())
    return lambda: run_once(job, way)
