"""What /metrics tells: vLLM's names, so that its dashboards and benchmarks read this server, and ours beside them.

Tokens are counted as they reach the server, everything else of a text when it has ended.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from runtime.serve.flight import Flight

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LENGTHS = (*range(17), 24, 32, 64)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Registry:
    """All figures of a server, each with the label `model_name`, and Prometheus' own of its process (`process_…`)."""

    def __init__(self) -> None:
        disable_created_metrics()  # a second line for each figure, which nobody reads
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        self.running = self._gauge("vllm:num_requests_running", "Texts that the engine writes now.")
        self.waiting = self._gauge("vllm:num_requests_waiting", "Texts that wait for it.")
        self.cache = self._gauge("vllm:kv_cache_usage_perc", "Share of the pages that is held; 1: all.")
        self.queries = self._counter("vllm:prefix_cache_queries", "Tokens of prompts that the cache was asked for.")
        self.hits = self._counter("vllm:prefix_cache_hits", "Tokens of prompts that it had.")
        self.prompt = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generated = self._counter("vllm:generation_tokens", "New tokens.")
        self.success = self._counter("vllm:request_success", "Texts that ended.", "finished_reason")
        self.preempted = self._counter("vllm:num_preemptions", "How often a text gave its pages back for others.")
        self.first = self._histogram("vllm:time_to_first_token_seconds", "From a request to its first token.", _SECONDS)
        self.gaps = self._histogram("vllm:inter_token_latency_seconds", "From a token to the next.", _GAPS)
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", "From a request to its last token.", _SECONDS)
        self.queue = self._histogram("vllm:request_queue_time_seconds", "Waiting for the engine.", _SECONDS)
        self.prefill = self._histogram("vllm:request_prefill_time_seconds", "Reading the prompt.", _SECONDS)
        self.decode = self._histogram("vllm:request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self.inference = self._histogram("vllm:request_inference_time_seconds", "Reading and decoding.", _SECONDS)
        self.prompts = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.texts = self._histogram("vllm:request_generation_tokens", "New tokens of a text.", _TOKENS)
        self.iteration = self._histogram("vllm:iteration_tokens_total", "New tokens of a round.", _TOKENS)
        self.rejections = self._counter("vllm:admission_rejections", "Requests refused because too much waits.")
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self.drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens of them.")
        self.accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Tokens of them that were accepted.")
        self.accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same by their place in the draft.", "position"
        )
        self.length = self._histogram("specpress:draft_length", "Tokens drafted a round.", _LENGTHS)
        self.gained = self._histogram("specpress:tokens_per_round", "τ of a text: new tokens a round.", _LENGTHS)
        self.forced = self._counter("specpress:grammar_forced_tokens", "Tokens drafted by a grammar.")
        self.faults = self._counter("specpress:drafter_faults", "Drafters that failed; texts went on without.")
        self.resumed = self._counter("specpress:resumed_requests", "Texts that went on in a new engine process.")
        self.restarts = self._counter("specpress:engine_restarts", "Engine processes that died.")
        self.draft_seconds = self._counter("specpress:draft_seconds", "Wall time of drafting.")
        self.target_seconds = self._counter("specpress:target_seconds", "Wall time of the target's forwards.")

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, about: str) -> Gauge:
        return Gauge(name, about, ["model_name"], registry=self.registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(name, about, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, ["model_name"], buckets=buckets, registry=self.registry)


class Meter:
    """Counts what happens to one model's texts."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._registry, self._model = registry, model
        self._prompt = registry.prompt.labels(model)
        self._generated = registry.generated.labels(model)
        self._gaps = registry.gaps.labels(model)
        self._first = registry.first.labels(model)
        self._iteration = registry.iteration.labels(model)
        for counter in _plain(registry):
            counter.labels(model)  # 0 is a figure, too

    def gained(self, flight: Flight, tokens: int, now: float) -> None:
        """See flight.Listener."""
        if flight.first is None:
            flight.first = now
            self._first.observe(now - flight.came)
            tokens_after = tokens - 1
        else:
            self._gaps.observe(now - flight.last)
            tokens_after = tokens - 1
        for _ in range(tokens_after):
            self._gaps.observe(0.0)  # tokens of one round come together
        self._generated.inc(tokens)

    def round(self, tokens: int) -> None:
        """See flight.Listener."""
        self._iteration.observe(tokens)

    def restarted(self) -> None:
        """See flight.Listener."""
        self._registry.restarts.labels(self._model).inc()

    def resumed(self, texts: int) -> None:
        """See flight.Listener."""
        self._registry.resumed.labels(self._model).inc(texts)

    def rejected(self) -> None:
        """A request was refused because too much waits."""
        self._registry.rejections.labels(self._model).inc()

    def ended(self, flight: Flight) -> None:
        """See flight.Listener."""
        one, model, figures = self._registry, self._model, flight.figures
        if not flight.accepted:
            return
        reason = "error" if flight.error is not None else {"cancelled": "abort"}.get(str(flight.finish), flight.finish)
        one.success.labels(model, reason).inc()
        self._prompt.inc(flight.prompt_tokens)
        one.prompts.labels(model).observe(flight.prompt_tokens)
        one.texts.labels(model).observe(len(flight.tokens))
        one.whole.labels(model).observe(max(0.0, flight.last - flight.came))
        if flight.first is not None:
            one.decode.labels(model).observe(max(0.0, flight.last - flight.first))
            queue = figures.get("queue_seconds", 0.0)
            one.prefill.labels(model).observe(max(0.0, flight.first - flight.came - queue))
            one.inference.labels(model).observe(max(0.0, flight.last - flight.came - queue))

    def figures(self, figures: dict[str, Any]) -> None:
        """See flight.Listener."""
        one, model = self._registry, self._model
        one.queue.labels(model).observe(figures.get("queue_seconds", 0.0))
        one.queries.labels(model).inc(figures["prompt_tokens"])
        one.hits.labels(model).inc(min(figures["reused_tokens"], figures["prompt_tokens"]))
        one.preempted.labels(model).inc(figures["preemptions"])
        one.drafts.labels(model).inc(sum(figures["draft_lengths"][1:]))
        one.drafted.labels(model).inc(sum(figures["drafted_at"]))
        one.accepted.labels(model).inc(sum(figures["accepted_at"]))
        for position, count in enumerate(figures["accepted_at"]):
            one.accepted_at.labels(model, str(position)).inc(count)
        length = one.length.labels(model)
        for tokens, rounds in enumerate(figures["draft_lengths"]):
            for _ in range(rounds):
                length.observe(tokens)
        if figures["rounds"]:
            one.gained.labels(model).observe(figures["gained"] / figures["rounds"])
        one.forced.labels(model).inc(figures.get("forced", 0))
        one.faults.labels(model).inc(sum(figures.get("drafter_faults", {}).values()))
        one.draft_seconds.labels(model).inc(figures["draft_seconds"])
        one.target_seconds.labels(model).inc(figures["target_seconds"])


def _plain(registry: Registry) -> Iterator[Counter | Gauge]:
    """The figures that have no label but the model."""
    for value in vars(registry).values():
        if isinstance(value, Counter | Gauge) and value not in (registry.success, registry.accepted_at):
            yield value
