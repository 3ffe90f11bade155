"""A llama-bench binary, started anew for each request: it loads the model, warms up and times itself.

A width is a prompt of so many tokens (-p) after the context (-d), width 1 a generated token (-n): unlike the other
engines it computes the last row's logits alone, whatever the width.
"""

import json
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.channel import open_channel, requests
from workers.protocol import Description, arguments


def run(command: list[str], prompt: int, new: int, context: int, repeats: int) -> tuple[dict[str, Any], list[float]]:
    """What it says of one test, and the milliseconds of each repetition. Raises RuntimeError where it fails."""
    deep = ["-d", str(context)] if context else []
    asked = [*command, "-p", str(prompt), "-n", str(new), *deep, "-r", str(repeats), "-o", "json"]
    done = subprocess.run(asked, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["(no message)"])[-1]
        raise RuntimeError(f"llama-bench ended with exit code {done.returncode}: {last}")
    found = [test for test in json.loads(done.stdout) if (test["n_prompt"], test["n_gen"]) == (prompt, new)]
    if len(found) != 1 or len(found[0]["samples_ns"]) != repeats:
        raise RuntimeError(f"expected one llama-bench test of {repeats} samples, found {len(found)}")
    return found[0], [taken / 1e6 for taken in found[0]["samples_ns"]]


def main() -> None:
    """Answers requests until stdin ends."""
    reply = open_channel()
    parser = arguments()
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--arguments", required=True)
    parser.add_argument("--depth", type=int, required=True)
    given = parser.parse_args()
    command = [str(given.binary), "-m", str(given.model), "-t", str(given.threads), *shlex.split(given.arguments)]
    context = given.context if given.depth else 0
    about, _ = run(command, 0, 1, 0, 1)
    facts = {
        "version": f"{about['build_commit']} ({about['build_number']})",
        "model": about["model_type"],
        "arguments": given.arguments or "none",
        "measures": f"itself; the last row's logits; context {context}",
    }
    reply(asdict(Description(int(about["model_size"]), facts)))
    for request in requests():
        if request["do"] == "prefill":
            reply({"ms": run(command, given.prefill, 0, 0, 1)[1]})
        else:
            width = request["width"]
            prompt, new = (0, 1) if width == 1 else (width, 0)
            reply({"ms": run(command, prompt, new, context, request["repeats"])[1]})


if __name__ == "__main__":
    main()
