"""The command `http` of `python -m runtime.bench`: what serving over HTTP costs against the engine alone."""

from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from runtime.bench.options import WIDEST, HttpOptions, at_least_one, numbers
from runtime.cli import takes
from runtime.errors import UserError


@takes(HttpOptions)
def http(options: HttpOptions) -> None:
    """Measures tokens/s and the time to the first token over HTTP, in turns with the engine in this process."""
    from runtime.bench.http import Clustered, Served, in_process, over_http
    from runtime.bench.jobs import facts_of, opened_job, say
    from runtime.bench.output import show_http, write
    from runtime.bench.speculate import ways
    from runtime.serve.command import require_packages
    from runtime.serve.ray_connection import require_ray

    require_packages()
    if options.cluster:
        require_ray(serving=True)
        if options.corpus is not None:
            raise UserError("--corpus: a cluster's file has no place for one; leave out either it or --cluster")
    if options.batch != 1:
        raise UserError("--batch: the texts at a time are the --clients here; leave it out")
    at_least_one({"--rounds": options.rounds})
    clients = numbers("--clients", options.clients, WIDEST)
    with opened_job(options) as (job, model), ExitStack() as servers:
        way = ways(job)[1]
        rows: list[dict[str, Any]] = []
        kinds = {"http": Served, "cluster": Clustered} if options.cluster else {"http": Served}
        ports = {name: servers.enter_context(kind(options, model, max(clients))).port for name, kind in kinds.items()}
        order = ["in_process", *ports]
        for count in clients:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
            for number in range(-1, options.rounds):  # the first one warms up
                say(f"{count} clients, round {number + 1} of {options.rounds}")
                for name in order[:: 1 if number % 2 else -1]:
                    one = over_http(ports[name], job, count) if name in ports else in_process(job, way, count)
                    if number >= 0:
                        found[name].append(one)
            row: dict[str, Any] = {"clients": count}
            for name, passes in found.items():
                row[name] = {
                    "tokens_per_second": median(speed for speed, _ in passes),
                    "ttft_ms": median(first for _, first in passes) * 1e3,
                }
            row["ratio"], row["ttft_added_ms"] = compared(found["http"], found["in_process"])
            if options.cluster:
                row["cluster"]["ratio"], row["cluster"]["ttft_added_ms"] = compared(found["cluster"], found["http"])
            rows.append(row)
        facts = facts_of(job, model) | {
            "protocol": "passes in-process and over HTTP (loopback, streams, one Python client) in turns; medians"
        }
        show_http(facts, rows)
        if options.json_file is not None:
            write(options.json_file, facts | {"result": rows})


def compared(ours: Sequence[tuple[float, float]], alone: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(median share of the tokens a second, median milliseconds that a first token is later by) of passes in pairs."""
    pairs = list(zip(ours, alone, strict=True))
    share = median(one[0] / other[0] for one, other in pairs)
    return share, median(one[1] - other[1] for one, other in pairs) * 1e3
