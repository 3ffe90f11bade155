"""BitNet b1.58 from scratch: the pair's architecture, once ternary and once in full precision, on the same tokens.

    python examples/ternary_from_scratch.py --tokens 2000000
    python examples/ternary_from_scratch.py --tokens 20000000 --norm --rate 2e-3 --out runs/scratch

Both start from the same random weights, read the same batches and follow the same schedule. Held-out perplexity is that
of standard-library files on which nothing here is trained. Writes curves.svg, curves.json and, of the ternary model,
the packed directory `model/` (not with --norm: packed layers have no norm inside). A run that was cut short goes on.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from calib import corpora
from calib.training_text import Measured, Stream, gather, tokenize
from calib.windows import make_windows
from compress.model.plan import make_plan
from compress.model.source import default_pair
from compress.model.structure import read_structure
from compress.qat.convert import RoundedModel
from compress.qat.layers import BitLinear
from compress.qat.stage import RoundedTask
from compress.recipe.training import Budget, Settings
from compress.recipe.training_stages import Ternary
from compress.report import figure as plots
from compress.training import float_model
from compress.training.data import PackedBatches
from compress.training.loop import TrainingResult, train
from compress.training.precision import has_bfloat16
from runtime.checkpoints.open import open_checkpoint


def make_ternary(model: nn.Module, norm: float | None) -> None:
    """Replaces the blocks' linear layers in place, each keeping its weight; `norm`: a norm before each of them."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            made = BitLinear(module.in_features, module.out_features, module.bias is not None, norm=norm)
            made.weight, made.bias = module.weight, module.bias
            model.set_submodule(name, made)


def windows_and_stream(source: str, out: Path, length: int, count: int, seed: int) -> tuple[Tensor, Stream]:
    """Held-out windows (E, length) and the stream to train on."""
    tokenizer = AutoTokenizer.from_pretrained(default_pair()[0])
    end = tokenizer.eos_token_id
    corpus = corpora.load()
    cut = {"length": length, "calibration": 0, "evaluation_tokens": count * length, "seed": seed, "separator": end}
    held_out = make_windows(corpus, tokenizer, **cut).evaluation
    measured = Measured(None, corpus, tokenizer, **cut)
    text = gather(source, measured)
    stream = tokenize(text, tokenizer, out, length=length, separator=end, progress=lambda *_: None)
    print(f"text: {text.name}, {len(stream):,} tokens; held out: {held_out.numel():,}")
    return held_out, stream


def plot(curves: dict[str, TrainingResult], path: Path) -> None:
    """Held-out perplexity over tokens, both models."""
    import matplotlib

    with matplotlib.rc_context(plots.STYLE):
        figure, axes = plots.new_figure(3.2)
        for (name, found), colour in zip(curves.items(), (plots.ORIGINAL, plots.COMPRESSED), strict=True):
            points = [(p.tokens, math.exp(p.held_out)) for p in found.curve if p.held_out is not None and p.tokens]
            axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.set(xlabel="tokens", ylabel="held-out perplexity", yscale="log")
        axes.grid(axis="y", which="both")
        axes.legend()
        figure.savefig(path, metadata={"Date": None})


def pack(model: nn.Module, plain: Path, out: Path) -> None:
    """Writes the ternary model's packed directory; `plain`: a directory of the same model with plain weights."""
    checkpoint, structure = open_checkpoint(plain), read_structure(plain)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    RoundedModel(
        model, checkpoint, structure, make_plan(shapes, structure, Ternary.model_validate({}).quantize())
    ).write(out / "model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens that each model reads")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate of both")
    parser.add_argument("--batch", type=int, default=16, help="windows in a step")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window")
    parser.add_argument("--norm", action="store_true", help="a norm before every ternary layer (BitNet's SubLN)")
    parser.add_argument("--source", default="python", help="what to train on: python, stdlib, a file or a dataset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/ternary-from-scratch"))
    given = parser.parse_args()

    given.out.mkdir(parents=True, exist_ok=True)
    held_out, stream = windows_and_stream(given.source, given.out, given.length, 40, given.seed)
    every = max(1, given.tokens // (given.batch * given.length) // 40)
    settings = Settings(
        learning_rate=given.rate,
        schedule="cosine",
        weight_decay=0.05,
        batch=given.batch,
        length=given.length,
        seed=given.seed,
        evaluate_every=every,
        save_every=every,
        autocast=has_bfloat16("cpu"),
    )
    config = AutoConfig.from_pretrained(default_pair()[0])
    found: dict[str, TrainingResult] = {}
    for name in ("full precision", "BitNet b1.58"):
        torch.manual_seed(given.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if name == "BitNet b1.58":
            model.to(torch.bfloat16).save_pretrained(given.out / "start")
            AutoTokenizer.from_pretrained(default_pair()[0]).save_pretrained(given.out / "start")
            make_ternary(model.float(), config.rms_norm_eps if given.norm else None)
        stage = Ternary.model_validate({"loss": {"cross_entropy": 1.0}})
        task = RoundedTask(model, None, held_out, stage, settings.autocast)
        folder = given.out / "checkpoints" / name.replace(" ", "-")
        found[name] = train(
            task,
            PackedBatches(stream, settings),
            Budget(tokens=given.tokens),
            settings,
            folder,
            progress=lambda *_: None,
            note=lambda line, name=name: print(f"{name}: {line}", flush=True),  # type: ignore[misc]
        )
        # In float32: what the loop saw may have been under autocast.
        print(f"{name}: perplexity {math.exp(float_model.held_out_loss(model, held_out)):.2f}", flush=True)
    if not given.norm:
        pack(model, given.out / "start", given.out)
    plot(found, given.out / "curves.svg")
    curves = {name: one.to_dict() for name, one in found.items()}
    (given.out / "curves.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")

    print(f"\n| {'model':15} | tokens | seconds | held-out perplexity | bits a block weight |")
    print("|---|---:|---:|---:|---:|")
    for (name, one), bits in zip(found.items(), (16, 2), strict=True):
        print(f"| {name:15} | {one.tokens:,} | {one.seconds:.0f} | {math.exp(one.best):.2f} | {bits} |")


if __name__ == "__main__":
    main()
