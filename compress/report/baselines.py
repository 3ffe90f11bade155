"""transformers' own `generate` on the original, as labelled rows: eager, assisted, static cache with torch.compile.

They run in a child process: a compilation cannot be interrupted inside this one, and its memory goes back when it ends.
`python -m compress.report.baselines` reads one JSON job from standard input and writes one JSON row per line.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.report.schema_speed import Baseline
from runtime.machine import free_memory

LIMIT_SECONDS = 60.0
NOTE = (
    "transformers' generate on the original in float32, timed after the other figures and not interleaved with them; "
    "on a model of a few million parameters such rows measure overhead per call more than arithmetic"
)
_PROMPTS, _NEW_TOKENS, _ROW_SECONDS = 4, 32, 12.0
_COMPILERS = ("g++", "clang++", "c++")


@dataclass(frozen=True)
class Job:
    """What the child measures: original and draft are directories, `rows` how many of `names`."""

    original: str
    draft: str | None
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    draft_length: int
    threads: int
    device: str = "cpu"
    rows: int = 3


def names(has_draft: bool) -> list[str]:
    """The rows, in the order in which they are measured: the one that may take too long comes last."""
    assisted = "transformers, assistant model" if has_draft else "transformers, prompt lookup"
    return ["transformers, eager", assisted, "transformers, static cache + torch.compile"]


def run(job: Job, limit: float = LIMIT_SECONDS) -> list[Baseline]:
    """One row per baseline, of some of the prompts, cut; a failure is a row with null and `why`."""
    labels = names(job.draft is not None)[: job.rows]
    if not labels:
        return []
    reason = _too_large(Path(job.original))
    if reason is not None:
        return [_row(name, reason) for name in labels]
    # All of one length: compiled shapes are fixed.
    shortest = min(len(prompt) for prompt in job.prompts[:_PROMPTS])
    prompts = [list(prompt[-shortest:]) for prompt in job.prompts[:_PROMPTS]]
    job = replace(job, prompts=prompts, new_tokens=min(job.new_tokens, _NEW_TOKENS))
    output, errors, finished = _child(job, limit)
    rows: dict[str, Baseline] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # other lines are a library's
            row = Baseline.model_validate_json(line)
            rows[row.name] = row
    last = (errors.strip().splitlines() or ["it said nothing"])[-1].strip()
    ending = f"the process ended: {last}" if finished else f"did not finish within {limit:.0f} seconds"
    return [rows.get(name, _row(name, ending)) for name in labels]


def _row(name: str, why: str) -> Baseline:
    return Baseline(name=name, tokens_per_second=None, prompts=None, new_tokens=None, note=NOTE, why=why)


def _too_large(original: Path) -> str | None:
    """Why the float32 copy cannot be afforded here, or None. Weights on disk are taken to have two bytes each."""
    stored = sum(file.stat().st_size for file in original.glob("*.safetensors"))
    free, needed = free_memory(), 2 * stored
    if free is not None and needed > free / 2:
        return f"a float32 copy would take {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB of free memory"
    return None


def _child(job: Job, limit: float) -> tuple[str, str, bool]:
    """Standard output, standard error, and whether it ended in time; the whole process group is ended otherwise."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    process = subprocess.Popen(
        [sys.executable, "-m", "compress.report.baselines"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    finished = True
    try:
        output, errors = process.communicate(json.dumps(asdict(job)), timeout=limit)
    except subprocess.TimeoutExpired:
        finished = False
        _end(process)
        output, errors = process.communicate()
    except BaseException:
        _end(process)
        raise
    return output, errors, finished


def _end(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _measure(job: Job) -> None:
    """In the child: one row after the other, each printed as soon as it is there."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job.threads)

    def load(path: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
        return model.eval().to(job.device)

    model = load(job.original)
    eager, assisted, compiled = names(job.draft is not None)
    _print(_guarded(eager, model, job, {}))
    if job.rows < 2:
        return
    if job.draft is not None:
        helper = load(job.draft)
        helper.generation_config.num_assistant_tokens = job.draft_length
        helper.generation_config.num_assistant_tokens_schedule = "constant"
        helper.generation_config.assistant_confidence_threshold = 0.0
        _print(_guarded(assisted, model, job, {"assistant_model": helper}))
    else:
        _print(_guarded(assisted, model, job, {"prompt_lookup_num_tokens": max(1, job.draft_length)}))
    if job.rows < 3:
        return
    if job.device == "cpu" and not any(shutil.which(compiler) for compiler in _COMPILERS):
        _print(
            _row(compiled, f"torch.compile needs a C++ compiler on a CPU, and none of {', '.join(_COMPILERS)} is here")
        )
        return
    from transformers import CompileConfig

    # One process only: a worker that outlives the time limit would be nobody's.
    torch._inductor.config.compile_threads = 1
    config = CompileConfig(mode="default")
    config._compile_all_devices = True  # type: ignore[assignment]  # generate compiles on accelerators only, unless told
    _print(_guarded(compiled, model, job, {"cache_implementation": "static", "compile_config": config}))


def _guarded(name: str, model: Any, job: Job, options: dict[str, Any]) -> Baseline:
    """A measured row, or one with the reason; a baseline's failure is a finding, not ours to stop for."""
    try:
        return _timed(name, model, job, options)
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0][:200]
        return _row(name, f"{type(error).__name__}: {said}")


def _timed(name: str, model: Any, job: Job, options: dict[str, Any]) -> Baseline:
    import torch

    def generate(prompt: Sequence[int]) -> int:
        ids = torch.tensor([prompt], device=job.device)
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=job.new_tokens,
            max_new_tokens=job.new_tokens,
            pad_token_id=0,
            **options,
        )
        # Reading the tokens waits for the device.
        return len(out[0].tolist()) - len(prompt)

    began = time.perf_counter()
    generate(job.prompts[0])
    warm_up = time.perf_counter() - began
    rates: list[float] = []
    began = time.perf_counter()
    for prompt in job.prompts:
        if rates and time.perf_counter() - began > _ROW_SECONDS:
            break
        started = time.perf_counter()
        new = generate(prompt)
        rates.append(new / (time.perf_counter() - started))
    rate = statistics.median(rates)
    return Baseline(
        name=name,
        tokens_per_second=rate,
        prompts=len(rates),
        new_tokens=job.new_tokens,
        warm_up_seconds=warm_up,
        note=NOTE,
        why=None,
    )


def _print(row: Baseline) -> None:
    print(row.model_dump_json(exclude_unset=True), flush=True)


if __name__ == "__main__":
    _measure(Job(**json.loads(sys.stdin.read())))
