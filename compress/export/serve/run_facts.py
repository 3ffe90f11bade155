"""What serving commands depend on, read from a run folder: its configs, its report, and what was exported."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.artifact import Artifact, manifest
from compress.context import FIXED_DRAFT_LENGTH
from compress.errors import UserError
from runtime.formats.schemes import GRID_KINDS
from runtime.speculative.draft import parts

DRAFTS = "serve/draft"
"""Where the page's commands put forms of the draft: under exports/ they would count as the target's."""

Vocabulary = Literal["same", "different", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run, as engines see it.

    name         what clients call the model.
    method       its `quant_method`; None: plain weights (a cache's scheme does not count).
    kinds        of its packed layers: int8, int6 (also int5), int4 (also int3 and int2), nf4, ternary, ternary-1.25,
                 trellis, fp8
    bits         of its packed layers, ascending.
    group        inputs that share a scale; 0: one per row, or nothing is packed.
    activations  whether inputs are rounded, too: dynamic, static, or none.
    asymmetric   whether any layer has zero points; reordered: whether any is in activation order.
    cache        int8, int4 or int3, where keys and values are to be kept so; declared: whether by kv_cache_scheme, too.
    heads, kv_heads, layers, experts, widths, positions   of the model; widths: what tensor parallelism cuts.
    draft        whether the run has one; vocabulary: whether it is the target's.
    medusa       whether the run has Medusa heads.
    fastest      who drafted fastest when the run was measured, by our drafters' names; none: nobody did; None: unknown.
    length       γ to serve with; why: a measurement's words, or why there are none.
    pays         False where the measurement advises against speculation.
    exports, draft_exports   forms that are there.
    """

    name: str
    model_type: str
    method: str | None
    kinds: frozenset[str] = frozenset()
    bits: tuple[int, ...] = ()
    group: int = 0
    activations: Literal["none", "dynamic", "static"] = "none"
    asymmetric: bool = False
    reordered: bool = False
    cache: str | None
    declared: bool
    heads: int
    kv_heads: int
    layers: int
    experts: int
    widths: tuple[int, ...]
    positions: int
    draft: bool
    vocabulary: Vocabulary
    medusa: bool
    fastest: str | None
    length: int
    why: str
    pays: bool
    exports: frozenset[str]
    draft_exports: frozenset[str]

    @property
    def tensor_parallel(self) -> int:
        """2 where attention and every row's groups can be cut in two, else 1."""
        whole = (self.heads, self.kv_heads, *(width // (self.group or 1) for width in self.widths))
        fits = all(width % (2 * (self.group or 1)) == 0 for width in self.widths)
        return 2 if fits and all(count % 2 == 0 for count in whole) else 1

    @property
    def pipeline_parallel(self) -> int:
        """2 where there are blocks enough."""
        return 2 if self.layers > 1 else 1


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """The first key that says one, else 0; of one for each block what divides them all."""
    found = next((config[key] for key in keys if config.get(key)), 0)
    return math.gcd(*map(int, found)) if isinstance(found, list) else int(found)


def read(run: Path) -> Facts:
    """The facts of a run folder. Raises UserError where it has no model or what it says cannot be read."""
    config = _config(run / "model")
    quantization = config.get("quantization_config") or {}
    heads = _number(config, "num_attention_heads", "n_head") or 1
    hidden = _number(config, "hidden_size", "n_embd")
    head_dim = _number(config, "head_dim") or hidden // heads
    intermediate = _number(config, "moe_intermediate_size", "intermediate_size") or 4 * hidden
    declared = quantization.get("kv_cache_scheme") is not None
    cache = (config.get("specpress") or {}).get("kv_cache", {}).get("kind")
    about = manifest.read(run)
    name = f"{Path(str(about.get('model'))).name}-{about.get('recipe')}"
    return Facts(
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-"),
        model_type=re.sub(r"[^A-Za-z0-9_-]", "", str(config.get("model_type", ""))),
        **packed(quantization),
        cache=cache if cache is not None or not declared else "int8",
        declared=declared,
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads") or heads,
        layers=_number(config, "num_hidden_layers", "n_layer") or 1,
        experts=_number(config, "num_local_experts", "num_experts"),
        widths=(heads * head_dim, intermediate),
        positions=int(config.get("max_position_embeddings") or config.get("n_positions") or 0),
        draft=(run / "draft").is_dir(),
        vocabulary=_vocabulary(run / "model", run / "draft") if (run / "draft").is_dir() else "unknown",
        medusa=(run / "medusa").is_dir(),
        **_drafting(run),
        exports=_forms(run / "exports"),
        draft_exports=_forms(run / DRAFTS),
    )


def _config(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder.name}/config.json cannot be read ({error}): name a folder that a run wrote"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{folder.name}/config.json: expected a mapping, found something else: write the model again")
    return content


def _forms(folder: Path) -> frozenset[str]:
    from compress.export import ABOUT

    return frozenset(path.parent.name for path in folder.glob(f"*/{ABOUT}"))


def packed(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """`Facts`' fields on the weights, from config.json's quantization_config."""
    method = quantization.get("quant_method", "bitsandbytes") if quantization else None
    if method == "bitsandbytes":
        kind, bits = ("int8", 8) if quantization.get("load_in_8bit") else ("nf4", 4)
        return {"method": method, "kinds": frozenset({kind}), "bits": (bits,)}
    if method == "bitnet":
        return {"method": method, "kinds": frozenset({"ternary"}), "bits": (2,), "activations": "dynamic"}
    if method == "specpress-ternary":
        return {"method": method, "kinds": frozenset({"ternary-1.25"}), "bits": (2,), "activations": "dynamic"}
    if method == "specpress-trellis":
        found = tuple(sorted(set((quantization.get("bits") or {}).values())))
        return {"method": method, "kinds": frozenset({"trellis"}), "bits": found, "activations": "dynamic"}
    if method in ("gptq", "awq"):
        bits = int(quantization.get("bits", 4))
        return {
            "method": method,
            "kinds": frozenset({"int8" if bits == 8 else "int4"}),
            "bits": (bits,),
            "group": max(int(quantization.get("group_size", 0)), 0),
            "asymmetric": bool(quantization.get("zero_point")) or quantization.get("sym") is False,
            "reordered": bool(quantization.get("desc_act")),
        }
    groups = [g for g in (quantization.get("config_groups") or {}).values() if isinstance(g, dict) and g.get("weights")]
    if not groups:
        return {"method": None if method == "compressed-tensors" else method}
    weights = [group["weights"] for group in groups]
    inputs = [group["input_activations"] for group in groups if group.get("input_activations")]
    return {
        "method": method,
        "kinds": frozenset(
            "fp8" if weight.get("type") == "float" else GRID_KINDS.get(weight["num_bits"], "int8") for weight in weights
        ),
        "bits": tuple(sorted({int(weight["num_bits"]) for weight in weights})),
        "group": max(int(weight.get("group_size") or 0) for weight in weights),
        "activations": "none" if not inputs else "dynamic" if all(i.get("dynamic") for i in inputs) else "static",
        "asymmetric": not all(weight.get("symmetric", True) for weight in weights),
        "reordered": any(weight.get("actorder") for weight in weights),
    }


def _drafting(run: Path) -> dict[str, Any]:
    """`Facts`' fields on speculation: who drafts best, γ, in what words it was measured, and whether it pays."""
    speed = (Artifact(run).report if (run / "report.json").is_file() else {}).get("speed") or {}
    fastest, advice = speed.get("drafter"), speed.get("advice")
    length = int(speed.get("draft_length") or FIXED_DRAFT_LENGTH)
    if not advice:
        why = f"Speculation was not measured, so {length} drafted tokens are a start, not advice."
        return {"fastest": fastest, "length": length, "why": why, "pays": fastest != "none"}
    if not advice["draft_length"]:
        return {"fastest": fastest, "length": length, "why": advice["why"], "pays": False}
    if fastest is not None and not {"medusa", "block", "tree", "nested"}.isdisjoint(parts(fastest)):
        # γ of a tree counts its nodes, and other engines have no drafter of these kinds.
        length = FIXED_DRAFT_LENGTH
        why = f"{advice['why']} Drafters of other kinds start with {length} tokens."
        return {"fastest": fastest, "length": length, "why": why, "pays": True}
    return {"fastest": fastest, "length": int(advice["draft_length"]), "why": advice["why"], "pays": True}


def _vocabulary(target: Path, draft: Path) -> Vocabulary:
    """Whether two directories' tokenizers give every id to the same token, judged by their tokenizer.json."""
    paths = [folder / "tokenizer.json" for folder in (target, draft)]
    if not all(path.is_file() for path in paths):
        return "unknown"
    if _config(target).get("vocab_size") != _config(draft).get("vocab_size"):
        return "different"
    if paths[0].read_bytes() == paths[1].read_bytes():
        return "same"
    from tokenizers import Tokenizer

    ours, theirs = (Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True) for path in paths)
    return "same" if ours == theirs else "different"
