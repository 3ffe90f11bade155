"""The command `http` of `python -m runtime.bench`: what serving over HTTP costs against the engine alone."""

from statistics import median
from typing import Any

from runtime.bench.options import WIDEST, HttpOptions, at_least_one, numbers
from runtime.cli import takes
from runtime.errors import UserError


@takes(HttpOptions)
def http(options: HttpOptions) -> None:
    """Measures tokens/s and the time to the first token over HTTP, in turns with the engine in this process."""
    from runtime.bench.http import Served, in_process, over_http
    from runtime.bench.jobs import facts_of, opened_job, say
    from runtime.bench.output import show_http, write
    from runtime.bench.speculate import ways
    from runtime.serve.command import require_packages

    require_packages()
    if options.batch != 1:
        raise UserError("--batch: the texts at a time are the --clients here; leave it out")
    at_least_one({"--rounds": options.rounds})
    clients = numbers("--clients", options.clients, WIDEST)
    with opened_job(options) as (job, model):
        way = ways(job)[1]
        rows: list[dict[str, Any]] = []
        with Served(options, model, max(clients)) as server:
            for count in clients:
                found: dict[str, list[tuple[float, float]]] = {"in_process": [], "http": []}
                for number in range(-1, options.rounds):  # the first one warms up
                    say(f"{count} clients, round {number + 1} of {options.rounds}")
                    for kind in ("in_process", "http")[:: 1 if number % 2 else -1]:
                        alone = kind == "in_process"
                        one = in_process(job, way, count) if alone else over_http(server.port, job, count)
                        if number >= 0:
                            found[kind].append(one)
                row: dict[str, Any] = {"clients": count}
                for kind, passes in found.items():
                    row[kind] = {
                        "tokens_per_second": median(speed for speed, _ in passes),
                        "ttft_ms": median(first for _, first in passes) * 1e3,
                    }
                pairs = list(zip(found["http"], found["in_process"], strict=True))
                row["ratio"] = median(ours[0] / alone[0] for ours, alone in pairs)
                row["ttft_added_ms"] = median(ours[1] - alone[1] for ours, alone in pairs) * 1e3
                rows.append(row)
        facts = facts_of(job, model) | {
            "protocol": "passes in-process and over HTTP (loopback, streams, one Python client) in turns; medians"
        }
        show_http(facts, rows)
        if options.json_file is not None:
            write(options.json_file, facts | {"result": rows})
