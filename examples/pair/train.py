"""Trains the embedded pair: `prepare`, `target`, `settle`, `draft`, `samples`, `distill`, `evaluate`, `export`.

Every stage resumes from its last checkpoint in the work directory, and is given a time, not a number of steps: the
schedule follows the share of the time that has passed, so that it ends well on a machine of any speed.

    python examples/pair/train.py prepare  --work runs/pair
    python examples/pair/train.py target   --work runs/pair --minutes 90
    python examples/pair/train.py settle   --work runs/pair --minutes 8
    python examples/pair/train.py draft    --work runs/pair --minutes 10
    python examples/pair/train.py samples  --work runs/pair --minutes 4
    python examples/pair/train.py distill  --work runs/pair --minutes 25
    python examples/pair/train.py export   --work runs/pair --out examples/pair
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from card import write_model
from data import VOCABULARY, Stream, prepare
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Plan:
    """One stage: peak learning rates (Muon for matrices, AdamW for the embedding), and when the rate starts to fall."""

    matrix_rate: float
    embedding_rate: float
    warmup_steps: int = 60
    stable: float = 0.55
    weight_decay: float = 0.05
    # (until this share of the time, sequence length)
    lengths: tuple[tuple[float, int], ...] = ((0.45, 256), (0.8, 512), (1.01, 1024))
    # Larger batches once the loss has stopped falling fast: (until this share, micro-batches a step).
    batches: tuple[tuple[float, int], ...] = ((0.35, 1), (1.01, 2))
    # Share of standard-library windows before and during the fall of the learning rate.
    library_share: tuple[float, float] = (0.12, 0.3)
    # Share of windows that the target wrote itself (`samples`).
    own_share: float = 0.0
    # Gaussian noise on the blocks' matrices in every forward, as a share of each row's root mean square.
    noise: float = 0.0


PLANS = {
    "target": Plan(matrix_rate=4e-3, embedding_rate=3e-3),
    # An hour of Muon leaves a minimum so sharp that noise of 4-bit rounding's size costs it 2 to 3 % of perplexity.
    # This short phase under random noise (no rounding, so no grid is favoured) looks for a flatter one. Noise of that
    # same size hardly moves it; three times as much does.
    "settle": Plan(
        matrix_rate=2e-3,
        embedding_rate=1e-3,
        warmup_steps=20,
        stable=0.35,
        lengths=((1.01, 512),),
        batches=((1.01, 1),),
        library_share=(0.2, 0.25),
        noise=0.3,
    ),
    "draft": Plan(matrix_rate=6e-3, embedding_rate=4e-3, stable=0.9, lengths=((1.01, 256),), batches=((1.01, 1),)),
    "distill": Plan(
        matrix_rate=5e-3,
        embedding_rate=4e-3,
        stable=0.4,
        lengths=((0.75, 256), (1.01, 512)),
        library_share=(0.12, 0.25),
        own_share=0.4,
    ),
}


def config(name: str) -> LlamaConfig:
    """Hidden 512 × 4 layers for the target; the draft has under a tenth of its parameters."""
    sizes = {"hidden_size": 192, "intermediate_size": 352, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    if name == "target":
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return LlamaConfig(
        vocab_size=VOCABULARY,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
        **sizes,
        **heads,
    )


def build(name: str, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(config(name), attn_implementation="sdpa")
    for key, weight in model.named_parameters():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_((2 * model.config.num_hidden_layers) ** -0.5)
    return model


def logits(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return F.linear(hidden, model.lm_head.weight)


def next_token_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean cross entropy in nats; tokens (rows, length + 1)."""
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(logits(model, tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def distillation_loss(student: LlamaForCausalLM, teacher: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Mean forward KL(teacher || student) in nats at every position, plus a tenth of the cross entropy on the text."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = logits(teacher, inputs).float()
        given = F.log_softmax(logits(student, inputs).float(), dim=-1)
    kl = F.kl_div(given, F.log_softmax(wanted, dim=-1), log_target=True, reduction="none").sum(-1).mean()
    return kl + 0.1 * F.nll_loss(given.flatten(0, 1), labels.flatten())


def optimizers(model: LlamaForCausalLM, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding (which is also the head) and the norms."""
    inside = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    outside = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(inside, lr=plan.matrix_rate, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outside, lr=plan.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(plan: Plan, step: int, share: float) -> float:
    """Warm-up by step, then flat, then linear to zero over the rest of the time."""
    warm = min(1.0, (step + 1) / plan.warmup_steps)
    fall = 1.0 if share < plan.stable else max(0.0, (1.0 - share) / (1.0 - plan.stable))
    return warm * fall


def at(table: tuple[tuple[float, int], ...], share: float) -> int:
    return next(value for until, value in table if share < until)


class Windows:
    """Batches that mix the standard library, and what the target wrote, into everything else."""

    def __init__(self, work: Path, seed: int, own_share: float):
        self.library = Stream(work / "library.bin", seed)
        self.others = Stream(work / "packages.bin", seed + 1)
        self.own = Stream(work / "samples.bin", seed + 3) if own_share else None
        self.own_share = own_share
        self.random = np.random.default_rng(seed + 2)

    def take(self, length: int, library_share: float) -> Tensor:
        rows = MICRO_BATCH_TOKENS // length
        own = int(self.random.binomial(rows, self.own_share)) if self.own else 0
        library = int(self.random.binomial(rows - own, library_share))
        counts = ((self.own, own), (self.library, library), (self.others, rows - own - library))
        return torch.from_numpy(np.concatenate([s.take(n, length) for s, n in counts if s is not None and n]))


def sample(work: Path, minutes: float, seed: int, prompt: int = 128, new: int = 256, rows: int = 96) -> None:
    """Continues training text with the target, half of it greedily, half at temperature 1, into samples.bin."""
    model = build("target", seed)
    model.load_state_dict(load_file(work / "settle.safetensors"), strict=False)
    model.eval().to(torch.bfloat16)
    windows = Windows(work, seed + 100, 0.0)
    out, began, sampled = [], time.monotonic(), False
    torch.manual_seed(seed)
    while time.monotonic() - began < 60 * minutes:
        text = windows.take(prompt, 0.3)
        text = text[torch.randperm(len(text))[:rows], :prompt]
        settings = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
        lengths = {"max_new_tokens": new, "min_new_tokens": new}
        written = model.generate(text, attention_mask=torch.ones_like(text), use_cache=True, **lengths, **settings)
        out.append(written.numpy().astype(np.uint16).ravel())
        sampled = not sampled
        np.concatenate(out).tofile(work / "samples.bin")
        print(json.dumps({"samples": sum(map(len, out)), "seconds": round(time.monotonic() - began)}), flush=True)


def perturb(model: LlamaForCausalLM, share: float) -> list[tuple[Tensor, Tensor]]:
    """Adds noise to the blocks' matrices in place; returns what was there, to be put back before the step."""
    kept = []
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                kept.append((weight, weight.detach().clone()))
                rms = weight.square().mean(dim=1, keepdim=True).sqrt()
                weight.add_(torch.randn_like(weight) * rms * share)
    return kept


def save(path: Path, state: dict) -> None:
    """A training checkpoint of our own making (weights_only on the way back), replaced atomically."""
    beside = path.with_suffix(".partial")
    torch.save(state, beside)
    beside.replace(path)


def train(name: str, work: Path, minutes: float, seed: int, start_from: Path | None, teacher: Path | None) -> None:
    plan = PLANS[name]
    model = build("target" if name in ("target", "settle") else "draft", seed)
    if start_from is not None:
        model.load_state_dict(load_file(start_from), strict=False)
    loss_of: Callable[[Tensor], Tensor] = partial(next_token_loss, model)
    if teacher is not None:
        frozen = build("target", seed)
        frozen.load_state_dict(load_file(teacher), strict=False)
        loss_of = partial(distillation_loss, model, frozen.requires_grad_(False))
    compiled = torch.compile(loss_of, dynamic=False)
    steps = optimizers(model, plan)
    checkpoint, log = work / f"{name}.checkpoint", work / f"{name}.log.jsonl"
    step, tokens_seen, spent = 0, 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(steps, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        step, tokens_seen, spent = state["step"], state["tokens"], state["seconds"]

    def keep() -> None:
        state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in steps]}
        save(checkpoint, state | {"step": step, "tokens": tokens_seen, "seconds": spent})

    windows = Windows(work, seed + 7 * step, plan.own_share)
    last_saved = time.monotonic()
    recent: list[float] = []
    while (share := spent / (60 * minutes)) < 1:
        began = time.monotonic()
        factor = rate_factor(plan, step, share)
        for optimizer, peak in zip(steps, (plan.matrix_rate, plan.embedding_rate), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        micro, length = at(plan.batches, share), at(plan.lengths, share)
        kept = perturb(model, plan.noise) if plan.noise else []
        for _ in range(micro):
            batch = windows.take(length, plan.library_share[share >= plan.stable])
            loss = compiled(batch) / micro
            loss.backward()
            recent.append(loss.item() * micro)
            tokens_seen += batch.shape[0] * length
        with torch.no_grad():
            for weight, clean in kept:
                weight.copy_(clean)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        # Compiling for a new length is not training time: without the cap it would eat the schedule.
        spent += min(time.monotonic() - began, 15.0)
        if step % 50 == 0:
            mean_loss = round(float(np.mean(recent)), 4)
            row = {"step": step, "tokens": tokens_seen, "share": round(share, 4), "loss": mean_loss}
            row |= {"rate": round(factor, 4), "length": length, "seconds": round(spent, 1)}
            with log.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            recent = []
            if not math.isfinite(mean_loss):
                raise SystemExit("train.py: the loss is not finite")
        if time.monotonic() - last_saved > 180:
            keep()
            last_saved = time.monotonic()
    keep()
    state = {name: value for name, value in model.state_dict().items() if "lm_head" not in name}
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in state.items()}
    save_file(weights, work / f"{name}.safetensors", metadata={"format": "pt"})
    summary = {"plan": asdict(plan), "steps": step, "tokens": tokens_seen, "minutes": round(spent / 60, 1)}
    (work / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")


def evaluate(work: Path, name: str, length: int = 1024) -> dict:
    """Bits per byte and perplexity per token on both held-out parts, in non-overlapping windows of `length`."""
    model = build("target" if name in ("target", "settle") else "draft", 0)
    path = work / f"{name}.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path), strict=False)
    else:
        model.load_state_dict(torch.load(work / f"{name}.checkpoint", weights_only=True)["model"])
    sizes = json.loads((work / "corpus.json").read_text())["sizes"]
    out = {}
    for part in ("held_library", "held_packages"):
        stream = np.memmap(work / f"{part}.bin", dtype=np.uint16, mode="r")[:400_000]
        bytes_per_token = sizes[part]["bytes"] / sizes[part]["tokens"]
        rows = torch.from_numpy(stream[: (len(stream) - 1) // length * length].astype(np.int64)).view(-1, length)
        count = len(rows) * (length - 1)
        with torch.inference_mode():
            nats = sum(next_token_loss(model, row).item() * len(row) * (length - 1) for row in rows.split(8)) / count
        out[part] = {
            "bits_per_byte": round(nats / math.log(2) / bytes_per_token, 4),
            "perplexity": round(math.exp(nats), 3),
            "tokens": count,
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stage", choices=["prepare", "target", "settle", "draft", "samples", "distill", "evaluate", "export"]
    )
    parser.add_argument("--work", type=Path, required=True, help="where token files, checkpoints and logs go")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time of the stage, earlier runs included")
    parser.add_argument("--model", default="target", help="what `evaluate` reads: target, draft or distill")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="where `export` writes target/ and draft/"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.stage == "prepare":
        prepare(given.work, given.seed)
    elif given.stage == "samples":
        sample(given.work, given.minutes, given.seed)
    elif given.stage == "export":
        for name, source in (("target", "settle"), ("draft", "distill")):
            write_model(given.work, source, config(name), given.out / name, evaluate(given.work, source))
    elif given.stage == "evaluate":
        print(json.dumps(evaluate(given.work, given.model), indent=1))
    else:
        before = {"settle": "target", "distill": "draft"}.get(given.stage)
        start = given.work / f"{before}.safetensors" if before else None
        teacher = given.work / "settle.safetensors" if given.stage == "distill" else None
        train(given.stage, given.work, given.minutes, given.seed, start, teacher)


if __name__ == "__main__":
    main()
