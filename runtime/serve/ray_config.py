"""What a cluster is told: one YAML file, read by `specpress cluster` and, within another, by `serve run`."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from runtime.errors import UserError
from runtime.files import regular
from runtime.serve.guard import is_loopback, read_keys
from runtime.serve.settings import Access, Limits, ModelSettings

_MODEL = (
    *("draft", "drafter", "draft_length", "kv", "states", "pages", "context", "max_batch"),
    *("device", "threads", "kernels"),
)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Replicas(_Part):
    """The engines: how many, and what of a node each takes.

    least, most    equal: so many; otherwise Ray adds and removes them by the load.
    texts          that one is to write at once, on average; beyond, another one is added. None: half of max_batch.
    per_node       at most; timings and caches want a node for one alone.
    cpus, gpus     of a node, as Ray counts them; resources: further ones, by the names that nodes were started with.
    up_after, down_after  seconds of more, or of less, load before Ray acts.
    leave          seconds that a replica which is to go has for its texts; then others go on with them.
    """

    least: int = Field(default=1, ge=1)
    most: int = Field(default=1, ge=1)
    texts: float | None = Field(default=None, gt=0)
    per_node: int = Field(default=1, ge=1, le=100)
    cpus: float = Field(default=1, ge=0)
    gpus: float = Field(default=0, ge=0)
    resources: dict[str, float] = {}
    up_after: float = Field(default=10, ge=0)
    down_after: float = Field(default=300, ge=0)
    leave: float = Field(default=30, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> "Replicas":
        if self.most < self.least:
            raise ValueError(f"most ({self.most}) must be at least least ({self.least})")
        return self


class Routing(_Part):
    """Who gets a text.

    prefix   the replica that knows the most of its beginning; false: Ray's own routing, by the shorter of two queues.
    balance  a replica may have so many times the mean load, and no more, to be preferred for what it knows.
    """

    prefix: bool = True
    balance: float = Field(default=1.25, ge=1)


class ClusterConfig(_Part):
    """A cluster. Paths are of every node: a shared folder, or copies at the same place.

    address        of Ray: "auto" where a node of it runs on this machine, HOST:PORT, ray://HOST:PORT; "local": a
                   cluster of this machine alone is started, and ends with the command.
    name           what clients call the model.
    fingerprints   resume texts of a lost replica on another of equal fingerprint; false: they end with an error.
    patience       seconds that a text waits for such a replica.
    deaths         replicas that may die over one text before it ends with an error.
    """

    target: str
    name: str = "model"
    address: str = "auto"
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    api_key_file: Path | None = None
    insecure: bool = False
    allow_hosts: tuple[str, ...] = ()
    draft: str | None = None
    drafter: str | None = None
    draft_length: int | None = Field(default=None, ge=0, le=64)
    kv: str = "auto"
    states: str = "float32"
    pages: int | None = Field(default=None, ge=1)
    context: int | None = Field(default=None, ge=2)
    max_batch: int = Field(default=32, ge=1, le=4096)
    device: str = "cpu"
    threads: int | None = Field(default=None, ge=1)
    kernels: str = "auto"
    chat_template: Path | None = None
    max_queued: int = Field(default=256, ge=0)
    max_queued_tokens: int = Field(default=1_000_000, ge=1)
    stall: float = Field(default=10, ge=2)
    lenient: bool = False
    resume: bool = True
    patience: float = Field(default=120, gt=0)
    deaths: int = Field(default=3, ge=1)
    replicas: Replicas = Replicas()
    routing: Routing = Routing()

    @classmethod
    def load(cls, path: Path) -> "ClusterConfig":
        """The file's cluster. Raises UserError, naming the key, for one that cannot be."""
        import yaml

        try:
            content = yaml.safe_load(regular(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(
                f"{path}: expected a YAML file, found none that can be read ({type(error).__name__})"
            ) from None
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Any, where: str) -> "ClusterConfig":
        """The same of plain data; `where` it was found."""
        if not isinstance(content, dict):
            raise UserError(f"{where}: expected keys and values, target: PATH at least; found {type(content).__name__}")
        try:
            found = cls(**content)
        except ValidationError as error:
            # A key that does not exist first: what is missing may be it.
            first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
            key = ".".join(map(str, first["loc"]))
            raise UserError(f"{where}: {key + ': ' if key else ''}{first['msg']}; see docs/scale.md") from None
        except TypeError:
            raise UserError(f"{where}: expected names as keys; see docs/scale.md") from None
        if not is_loopback(found.host) and found.api_key_file is None and not found.insecure:
            raise UserError(
                f"{where}: host {found.host} can be reached from other machines: give api_key_file, or insecure: true"
            )
        return found

    @property
    def model(self) -> ModelSettings:
        """As a replica is told."""
        return ModelSettings(self.name, self.target, **{key: getattr(self, key) for key in _MODEL})

    @property
    def limits(self) -> Limits:
        """Of what is taken on; texts wait in the ingress, so each replica's own queue stays empty."""
        return Limits(self.max_queued, self.max_queued_tokens, stall=self.stall, lenient=self.lenient)

    @property
    def access(self) -> Access:
        """Who may ask. Raises UserError for a file of keys that cannot be read."""
        return Access(self.host, self.port, read_keys("api_key_file", self.api_key_file), hosts=self.allow_hosts)
