"""What the engine's process makes of its settings and of what is asked: a model, an engine, requests."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.contract import Cache, no_drafts
from runtime.engine.engine import Engine
from runtime.engine.requests import RequestOptions, make_request
from runtime.errors import UserError
from runtime.files import read_json
from runtime.machine import free_memory
from runtime.model.load import Model, load
from runtime.sampling.params import Sampling
from runtime.sampling.stopping import Exactly
from runtime.serve.settings import ModelSettings
from runtime.speculate import CacheOptions
from runtime.speculative.costs import first_costs
from runtime.speculative.draft import Drafter, NoDrafter, Rule
from runtime.speculative.draft_length import Controller
from runtime.speculative.drafters.by_name import drafter_by_name
from runtime.speculative.drafters.for_requests import request_drafters
from runtime.speculative.drafters.other_tokenizer import model_drafter
from runtime.speculative.measured import NOTHING_KNOWN
from runtime.speculative.recorded import needs_planes

if TYPE_CHECKING:
    from runtime.speculative.draft import Request

PAGE = 64  # tokens
_SHARE = 4  # of the memory that is free, one part for keys and values
_UNTOLD = 4_000_000_000  # bytes that are taken to be free where the system does not tell
_TEXT = (
    "The harbour lay still in the morning, and the boats that had come in at night were tied to the wall one beside the"
    " other. A man in a blue coat counted the crates on the quay, wrote the number into his book, and began again."
)
_SLICES, _SLICE = 256, 4096  # of a weight file: what its digest is made of


def opened(settings: ModelSettings) -> tuple[Model, Engine, dict[str, Any]]:
    """The model, an engine that runs it, and what the server has to know of them.

    Raises UserError for a model that cannot be loaded, and a drafter that does not fit it.
    """
    options: dict[str, Any] = {"device": settings.device, "threads": settings.threads, "kernels": settings.kernels}
    options["context"] = settings.context
    _require_memory(settings)
    model = load(settings.path, planes=needs_planes(settings.drafter, settings.draft, settings.path), **options)
    _ = model.tokenizer  # is read at its first use: here, and not in the middle of the first request
    corpus = None if settings.corpus is None else Path(settings.corpus)
    verify: Any = settings.verify
    chosen = drafter_by_name(model, settings.drafter, settings.draft, corpus, verify, options)
    drafters = request_drafters(_default(model, chosen.drafter, verify))
    positions = model.decoder.max_positions
    context = positions if settings.context is None else min(settings.context, positions)
    cache = _cache(model, settings, context)
    length: int | Controller | None = settings.draft_length
    if length is None:
        length = Controller(prior=chosen.prior, widths=_widths(model))
    engine = Engine(model.decoder, drafters, length, verify, cache, max_batch=settings.max_batch, lenient=True)
    about = {
        "model": str(model.path),
        "vocab_size": model.decoder.vocab_size,
        "context": min(context, cache.pages * PAGE) if cache.pages else context,
        "end_tokens": sorted(model.end_tokens),
        "exact": model.decoder.exact,
        "verify": settings.verify,
        "drafters": list(dict.fromkeys([*drafters, "none", "grammar"])),
        "pages": cache.pages,
        "max_batch": settings.max_batch,
        "fingerprint": fingerprint(model),
    }
    return model, engine, about


def requested(model: Model, id_: int, asked: dict[str, Any], grammar: Any) -> "Request":
    """What was asked as a request of the engine. Raises UserError for values out of range."""
    return make_request(
        model,
        asked["prompt"],
        asked["max_new_tokens"],
        Sampling(**asked["sampling"]),
        Exactly(frozenset(asked["stop"][0]), tuple(asked["stop"][1])),
        RequestOptions(**asked["options"]),
        id=id_,
        grammar=grammar,
        resumed=asked["resumed"],
    )


def fingerprint(model: Model) -> str:
    """A digest of what decides a text's bytes: the weights, the kernels that run, and this version.

    Of weights that no manifest tells of, the sizes and 256 slices of each file count.
    """
    said = hashlib.sha256(f"{metadata.version('specpress')} {model.decoder.kernels} {model.decoder.kv.kind}".encode())
    manifest = model.path.parent / "manifest.json"
    if model.path.name == "model" and manifest.is_file():
        said.update(json.dumps(read_json(manifest).get("model"), sort_keys=True).encode())
    files = [model.path] if model.path.is_file() else sorted(model.path.glob("*"))
    for file in files:
        if file.suffix in (".safetensors", ".gguf", ".onnx", ".data", ".json"):
            said.update(f"{file.name} {file.stat().st_size} ".encode())
            _slices(file, said)
    return f"fp_{said.hexdigest()[:16]}"


def _slices(file: Path, said: Any) -> None:
    size = file.stat().st_size
    with file.open("rb") as data:
        for place in range(_SLICES):
            data.seek(size * place // _SLICES)
            said.update(data.read(_SLICE))


def cache_options(settings: ModelSettings) -> CacheOptions:
    """How the model's caches hold what they hold, each request in memory of its own. Raises UserError."""
    return CacheOptions(settings.kv, None, settings.states)  # type: ignore[arg-type]  # it refuses what is none


def _cache(model: Model, settings: ModelSettings, context: int) -> Cache:
    """Pages where the decoder has them; otherwise memory for each request."""
    options = replace(cache_options(settings), pages=settings.pages)
    if settings.pages is not None:
        return options.make(model.decoder)
    try:
        one = replace(options, pages=1).make(model.decoder)
    except UserError:
        return options.make(model.decoder)
    per_text = -(-context // PAGE)
    room = _free_memory(model) // _SHARE // max(1, one.bytes_per_token() * PAGE)
    return replace(options, pages=max(per_text, min(room, per_text * settings.max_batch))).make(model.decoder)


def _require_memory(settings: ModelSettings) -> None:
    """Raises UserError for a model whose weights alone exceed this machine's free memory: loading would end others."""
    path = Path(settings.path).expanduser()
    files = [path] if path.is_file() else [*path.glob("*"), *path.glob("model/*")]
    size = sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf", ".data"))
    if settings.device == "cpu" and size > _free_on_host():
        raise UserError(
            f"{path.name} has {size / 1e9:.1f} GB of weights, and {_free_on_host() / 1e9:.1f} GB of memory are free:"
            " unload a model first, or take a smaller one"
        )


def _free_memory(model: Model) -> int:
    """Bytes that may still be taken, where the decoder keeps keys and values."""
    if model.decoder.device.type == "cuda":
        from runtime.model.triton.cache import free_bytes

        return free_bytes(model.decoder.device)
    return _free_on_host()


def _free_on_host() -> int:
    free = free_memory()
    return _UNTOLD if free is None else free


def _widths(model: Model) -> Mapping[int, float]:
    """What forwards of some rows take over one of one row, by a text's beginning; a GPU shows it in its first rounds.

    Real text: a mixture's neighbouring tokens share experts.
    """
    decoder = model.decoder
    if no_drafts(decoder) or decoder.device.type != "cpu":
        return NOTHING_KNOWN
    tokens = model.tokenizer(_TEXT)["input_ids"][: decoder.max_positions // 4]
    return first_costs(model, tokens) if tokens else NOTHING_KNOWN


def _default(model: Model, chosen: Model | Drafter | None, verify: Rule) -> Drafter:
    """Who drafts where a request names nobody."""
    if chosen is None:
        return NoDrafter()
    return model_drafter(model, chosen, verify) if isinstance(chosen, Model) else chosen
