"""What a server is told when it starts: its models, and how much it takes on."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ModelSettings:
    """One model to serve.

    name          what clients call it.
    path          a run folder, a model directory, a GGUF file or a hub name.
    drafter       by name; None: as `runtime.generate` chooses. `draft` and `corpus` are for it.
    draft_length  γ; None: what pays most, chosen every round.
    verify        the rule for sampled proposals.
    kv, pages     how keys and values are held, and in how many pages of 64 tokens (None: by the memory that is free).
    states        what the states of layers that carry one are held in: float32, float16 or int8.
    context       the most tokens of prompt and answer; None: as many as the model has positions.
    max_batch     requests in one forward; the others wait.
    """

    name: str
    path: str
    draft: str | None = None
    drafter: str | None = None
    corpus: str | None = None
    draft_length: int | None = None
    verify: str = "coupled"
    kv: str = "auto"
    states: str = "float32"
    pages: int | None = None
    context: int | None = None
    max_batch: int = 32
    device: str = "cpu"
    threads: int | None = None
    kernels: str = "auto"


@dataclass(frozen=True)
class Limits:
    """How much is taken on.

    max_queued         texts that wait beyond those that run.
    max_queued_tokens  tokens of prompts that wait.
    max_body           bytes of a request's body.
    drain              seconds that running texts have when the server is told to stop.
    stall              seconds of silence after which the engine's process is held to be dead.
    lenient            ignore fields that are not known.
    """

    max_queued: int = 256
    max_queued_tokens: int = 1_000_000
    max_body: int = 8_000_000
    drain: float = 30.0
    stall: float = 10.0
    lenient: bool = False


@dataclass(frozen=True)
class Access:
    """Who may ask.

    host, port    where the server listens.
    keys          one of them must come with every request but /health; empty: nobody is asked.
    admin_keys    the same for /admin; empty: only who asks from this machine.
    hosts         further names that a request's Host header may have.
    cors_origins  pages of these origins may read answers in a browser.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageSettings:
    """What the page shows beside the models.

    runs      folder whose runs and sweeps are listed; None: none are.
    original  name of the model that the others are compared with; None: there is none.
    """

    runs: Path | None = None
    original: str | None = None
