"""Whatever somebody's config.json says, a model runs or a sentence says why not; nothing crashes.

`pytest -m slow` tries 20,000 of them.
"""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.checkpoints.model_config import check, check_generation
from runtime.contract import Rows
from runtime.errors import UserError
from runtime.model.load import load
from tests import mutations
from tests.runtime.model import families

Tiny = Callable[..., Path]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe")
# Keys that a file may lack: with a value they mean something.
MORE = [
    *("num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "max_position_embeddings", "layer_types"),
    *("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "eos_token_id", "bos_token_id", "dtype", "torch_dtype", "hidden_act", "tie_word_embeddings"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    *("mlp_only_layers", "quantization_config", "model_type", "architectures", "use_cache", "text_config"),
]
ROPE = [
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "mscale", "attention_factor", "original_max_position_embeddings", "long_factor"),
]
KNOWN = (
    "linear",
    "llama3",
    "yarn",
    "dynamic",
    "longrope",
    "default",
    "silu",
    "gelu",
    "sliding_attention",
    "llama",
    "gpt2",
)
NUMBERS = st.one_of(st.sampled_from(mutations.NUMBERS), st.integers(-4, 200))
PLAIN = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from([*mutations.WORDS, *KNOWN, "torch.bfloat16"]))
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.dictionaries(st.sampled_from(ROPE), PLAIN, max_size=4))


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, list[tuple[str, str | None, Any]]]:
    """A family, and what is written over: key, the key inside of it or None, value."""
    keys = st.sampled_from([*MORE, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
    top = st.tuples(keys, st.none(), VALUES)
    rope = st.tuples(st.just("rope_parameters"), st.sampled_from(ROPE), st.one_of(NUMBERS, PLAIN))
    return draw(st.sampled_from(FAMILIES)), draw(st.lists(st.one_of(top, rope), min_size=1, max_size=2))


def write(source: Path, target: Path, changed: list[tuple[str, str | None, Any]]) -> Path:
    """A copy of a model whose config.json says something else."""
    values = json.loads((source / "config.json").read_text())
    for key, inner, value in changed:
        if inner is not None and isinstance(values.get(key), dict):
            values[key] = values[key] | {inner: value}
        else:
            values[key] = value
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    shutil.copy(source / "model.safetensors", target)
    (target / "config.json").write_text(json.dumps(values))
    return target


def runs(folder: Path, kernels: str) -> bool:
    """Whether a model loads and computes; False where a sentence says why not."""
    try:
        model = load(folder, threads=1, kernels=kernels)
        cache = model.decoder.new_cache()
        rows = Rows.chains([(cache.open(8), 0, 5)])
        out = model.decoder.forward(torch.arange(5), rows, cache)
        model.end_tokens  # noqa: B018 (read, for what it raises)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    assert out.logits.shape[0] == 5
    return True


def hold(tiny: Tiny, tmp_path: Path, examples: int) -> None:
    outcomes: set[bool] = set()

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(changes(), st.sampled_from(["auto", "reference"]))
    def check_one(change: tuple[str, list[tuple[str, str | None, Any]]], kernels: str) -> None:
        family, changed = change
        outcomes.add(runs(write(tiny(family), tmp_path / "changed", changed), kernels))

    check_one()
    assert outcomes == {True, False}


def test_any_configuration_runs_or_is_refused_in_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    hold(tiny, tmp_path, 300)


@pytest.mark.slow
def test_many_configurations_run_or_are_refused_in_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    hold(tiny, tmp_path, 20_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 64.0}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e15}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": -1.0}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "must be even"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 10**30}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": ["x"]}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "bogus", "rope_theta": 1e4}}, "bogus"),
        ({"rope_parameters": {"rope_type": "linear", "factor": None, "rope_theta": 1e4}}, "linear"),
        ({"hidden_act": "bogus"}, "bogus"),
        ({"dtype": "bogus"}, "dtype"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"head_dim": 15}, "15"),
        ({"sliding_window": [1]}, "sliding_window"),
        ({"eos_token_id": {}}, "eos_token_id"),
        ({"eos_token_id": 1.5}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"full_attn_idxs": 3}, "full_attn_idxs"),
        ({"conv_L_cache": 10**9}, "conv_L_cache"),
        ({"block_ffn_dim_multiplier": float("inf")}, "block_ffn_dim_multiplier"),
        ({"num_dense_layers": -1}, "num_dense_layers"),
        ({"linear_num_value_heads": 0}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 10**9}, "linear_conv_kernel_dim"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
    ],
)
def test_refusals_name_the_key(tiny: Tiny, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = tiny("llama")
    assert runs(write(source, tmp_path / "same", []), "auto")
    with pytest.raises(UserError, match=message):
        load(write(source, tmp_path / "changed", [(key, None, value) for key, value in change.items()]))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_token_has_no_more_experts_than_there_are(tiny: Tiny, tmp_path: Path, family: str) -> None:
    with pytest.raises(UserError, match="num_experts_per_tok is 99"):
        load(write(tiny(family), tmp_path / "changed", [("num_experts_per_tok", None, 99)]))
    if family == "qwen3_moe":
        with pytest.raises(UserError, match="decoder_sparse_step"):
            load(write(tiny(family), tmp_path / "changed", [("decoder_sparse_step", None, 0)]))


# Values of any key that a family's own configuration has.
ANY = [None, -1, 0, 1, 3, 7, 1.5, True, False, "x", [], [1], {}, 10**9, 2**40]


def written_over(kind: str, folder: Path, share: float) -> set[bool]:
    """What becomes of a share of all pairs of a key and a value."""
    source, drawn = families.write(kind, folder / kind), random.Random(kind)
    keys = [key for key in json.loads((source / "config.json").read_text()) if key not in ("architectures", "dtype")]
    pairs = [(key, value) for key in keys for value in ANY if drawn.random() < share]
    return {
        runs(write(source, folder / "changed", [(key, None, value)]), drawn.choice(["auto", "reference"]))
        for key, value in pairs
    }


@pytest.mark.parametrize("kind", ["gptj", "hy_v3", "afmoe", "lfm3", "granitemoe_swa"])
def test_some_keys_of_a_family_written_over(tmp_path: Path, kind: str) -> None:
    assert written_over(kind, tmp_path, 0.05) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.FAMILIES)
def test_all_keys_of_a_family_written_over(tmp_path: Path, kind: str) -> None:
    assert written_over(kind, tmp_path, 1.0) == {True, False}


@pytest.mark.parametrize("text", ["", "[1]", '{"eos_token_id": ["x"]}', '{"eos_token_id": {}}', "\xff", "1" * 5000])
def test_a_broken_generation_config_is_refused(tiny: Tiny, tmp_path: Path, text: str) -> None:
    folder = write(tiny("llama"), tmp_path / "model", [])
    (folder / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load(folder).end_tokens  # noqa: B018 (read, for what it raises)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert load(folder).end_tokens == {3, 5}


def test_configurations_of_every_causal_model_of_transformers_pass() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    seen = 0
    for kind in KINDS:
        try:
            values = json.loads(transformers.AutoConfig.for_model(kind).to_json_string(use_diff=False))
        except Exception:  # a kind whose configuration has no defaults
            continue
        check(values, kind)
        seen += 1
    assert seen > 150
    check_generation(transformers.GenerationConfig(eos_token_id=[1, 2]).to_dict(), "generation_config.json")
