"""What the command `ours` of `python -m runtime.audit` does with its options."""

import sys

import typer

from runtime.audit.options import OursOptions
from runtime.audit.ours import CaseResult, Sweep, random_prompts, sweep
from runtime.errors import UserError


def audit_ours(options: OursOptions) -> None:
    """Sweeps over settings, shows the results by drafter and writes them; exit code 1 unless all are done and equal."""
    from rich.console import Console
    from rich.progress import Progress

    from runtime.audit.known import DESCRIPTION, letter_ids
    from runtime.bench.output import console, write
    from runtime.bench.prompts import read_prompts
    from runtime.model.load import load

    known = (options.model / DESCRIPTION).is_file()
    path = options.model / "target" if known else options.model
    draft = options.draft or (options.model / "draft" if known else None)
    target = load(path, threads=options.threads, kernels=options.kernels)
    if draft is None:
        draft = target.draft_path
    if options.prompts is None:
        prompts = random_prompts(target.decoder.vocab_size, letter_ids() if known else None, options.seed)
    else:
        texts = [prompt.text for prompt in read_prompts(options.prompts)][:64]
        prompts = [list(target.tokenizer(text)["input_ids"]) for text in texts]
    longest = max(map(len, prompts)) + options.new_tokens
    if longest > target.decoder.max_positions:
        raise UserError(f"--new-tokens: texts of {longest} tokens do not fit {path.name}; ask for fewer")
    task = Sweep(
        target,
        None if draft is None else load(draft, threads=options.threads, kernels=options.kernels),
        prompts,
        options.settings,
        options.seconds,
        options.new_tokens,
        options.seed,
    )
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        step = bar.add_task("settings", total=options.settings)
        results = sweep(task, options.out, lambda done, total: bar.update(step, completed=done, total=total))
    wanted = len(task.cases())
    verdict, sentence = judged(results, wanted)
    out = console()
    out.print(_table(results))
    out.print(f"{verdict}: {sentence}", markup=False, soft_wrap=True)
    if options.json is not None:
        listed = [one.model_dump(mode="json") for one in results]
        write(options.json, {"verdict": verdict, "sentence": sentence, "results": listed})
    if verdict != "lossless":
        raise typer.Exit(1)


def judged(results: list[CaseResult], wanted: int) -> tuple[str, str]:
    """The verdict on a sweep of so many settings, and its sentence."""
    tokens, differing = sum(one.tokens for one in results), sum(one.differing for one in results)
    said = f"{differing} of {tokens} tokens differ over {len(results)} settings"
    if differing:
        first = next(one for one in results if one.differing)
        return "differs", f"{said}; the first: {first.first} at {first.key}"
    if not sum(one.accepted for one in results):
        return "cannot tell", f"{said}, but no drafted token was accepted"
    if len(results) < wanted:
        return "cannot tell", f"{said}; {wanted - len(results)} settings are left: run it again with --out, or longer"
    return "lossless", said


def _table(results: list[CaseResult]) -> object:
    from runtime.bench.output import table

    rows = []
    for name in dict.fromkeys(one.drafter for one in results):
        own = [one for one in results if one.drafter == name]
        sums = {key: sum(getattr(one, key) for one in own) for key in ("tokens", "drafted", "accepted", "differing")}
        rows.append({"drafter": name, "settings": len(own), **sums})
    counts = ("settings", "tokens", "drafted", "accepted", "differing")
    return table([("drafter", "drafter", "s"), *((key, key, ",d") for key in counts)], rows)
