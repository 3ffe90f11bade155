"""The table of planted faults: the form, its name, how it is planted, and what a check has to say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.compress.check.planted import (
    GROUP,
    OTHER,
    UP,
    K,
    Planted,
    Q,
    add_to_nibbles,
    block_nan,
    block_nibbles,
    change,
    change_bytes,
    configure,
    cut_short,
    in_shards,
    leave_plain,
    move_tokens,
    nibbles,
    other_angle,
    put,
    rename_tensor,
    rotary_neighbours,
    swap,
    swap_blocks,
    unwoven,
    with_nan,
)

Fault = tuple[str, str, Callable[[Path], Any], Planted]
FAULTS: tuple[Fault, ...] = (
    (
        "gptq",
        "zero points off by one",
        lambda f: change(f, lambda t: put(t, f"{UP}.qzeros", lambda z: add_to_nibbles(z, 1))),
        Planted(UP, ("zero points are lowered by 1",)),
    ),
    (
        "gptq",
        "layout says v1",
        lambda f: configure(f, lambda c: c["quantization_config"].update(checkpoint_format="gptq")),
        Planted("model.layers", ("zero points are lowered by 1",)),
    ),
    (
        "gptq",
        "order of inputs lost",
        lambda f: change(f, lambda t: put(t, f"{UP}.g_idx", lambda g: (torch.arange(g.numel()) // GROUP).to(g.dtype))),
        Planted(UP, ("activation order (g_idx) is lost",)),
    ),
    (
        "gptq",
        "nibbles swapped",
        lambda f: change(f, lambda t: put(t, f"{Q}.qweight", nibbles)),
        Planted(Q, ("nibbles",)),
    ),
    (
        "gptq",
        "scales swapped",
        lambda f: change(f, lambda t: swap(t, f"{UP}.scales", f"{OTHER}.scales")),
        Planted(UP, ("scales of", OTHER)),
    ),
    ("gptq", "NaN scale", lambda f: change(f, lambda t: put(t, f"{K}.scales", with_nan)), Planted(K, ("finite",))),
    (
        "gptq",
        "zero points transposed",
        lambda f: change(f, lambda t: put(t, f"{UP}.qzeros", lambda z: z.t().reshape(z.shape))),
        Planted(UP, ("zero points",)),
    ),
    (
        "gptq",
        "desc_act false",
        lambda f: configure(f, lambda c: c["quantization_config"].update(desc_act=False)),
        Planted("quantization_config.desc_act", ("g_idx",)),
    ),
    (
        "gptq",
        "bits of another",
        lambda f: configure(f, lambda c: c["quantization_config"].update(bits=8)),
        Planted("model.layers", ("8 bits",)),
    ),
    (
        "gptq",
        "two layers swapped",
        lambda f: change(
            f,
            lambda t: [swap(t, f"{UP}.{part}", f"{OTHER}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")],
        ),
        Planted(UP, ("holds what the original has as", OTHER)),
    ),
    (
        "awq",
        "order of outputs lost",
        lambda f: change(f, lambda t: put(t, f"{UP}.qweight", unwoven)),
        Planted(UP, ("order of eight",)),
    ),
    (
        "awq",
        "scales transposed",
        lambda f: change(f, lambda t: put(t, f"{UP}.scales", lambda s: s.t().reshape(s.shape))),
        Planted(UP, ("scales",)),
    ),
    (
        "awq",
        "zero points off by one",
        lambda f: change(f, lambda t: put(t, f"{K}.qzeros", lambda z: add_to_nibbles(z, -1))),
        Planted(K, ("zero points are raised by 1",)),
    ),
    (
        "awq",
        "flag of zero points",
        lambda f: configure(f, lambda c: c["quantization_config"].update(zero_point=False)),
        Planted("quantization_config.zero_point", ("zero points",)),
    ),
    (
        "int4",
        "scales twice too large",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight_scale", lambda s: s * 2)),
        Planted(UP, ("2 times what they should be",)),
    ),
    (
        "int4",
        "file cut short",
        lambda f: cut_short(f / "model.safetensors"),
        Planted("model.safetensors", ("truncated",)),
    ),
    ("int4", "part missing", lambda f: change(f, lambda t: t.pop(f"{Q}.weight_scale")), Planted(Q, ("missing",))),
    (
        "int4",
        "group size of another",
        lambda f: configure(
            f, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=64)
        ),
        Planted("model.layers", ("groups of 32", "groups of 64")),
    ),
    ("int4", "layer left plain", lambda f: leave_plain(f, Q), Planted(Q, ("stored plain",))),
    (
        "int4",
        "layer excepted and packed",
        lambda f: configure(f, lambda c: c["quantization_config"]["ignore"].append(K)),
        Planted(K, ("leaves this layer as it is",)),
    ),
    (
        "int4-asymmetric",
        "constant scales",
        lambda f: change(
            f, lambda t: put(t, f"{UP}.weight_scale", lambda s: torch.full_like(s, float(s.float().mean())))
        ),
        Planted(UP, ("scales are the same",)),
    ),
    (
        "int8",
        "rows off",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", lambda w: torch.cat([w[:50], w[50:55].flip(1), w[55:]]))),
        Planted(UP, ("5 of 192 rows",)),
    ),
    (
        "fp8",
        "scales inverted",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight_scale", lambda s: 1 / s)),
        Planted(UP, ("scales are inverted",)),
    ),
    (
        "int8",
        "scales swapped",
        lambda f: change(f, lambda t: swap(t, f"{UP}.weight_scale", f"{OTHER}.weight_scale")),
        Planted(UP, ("scales of", OTHER)),
    ),
    (
        "nf4",
        "nibbles swapped",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", nibbles)),
        Planted(UP, ("nibbles",)),
    ),
    (
        "nf4",
        "absmax swapped",
        lambda f: change(
            f,
            lambda t: [
                swap(t, f"{UP}.weight.{p}", f"{OTHER}.weight.{p}")
                for p in ("absmax", "nested_absmax", "quant_state.bitsandbytes__nf4")
            ],
        ),
        Planted(UP, ("scales of", OTHER)),
    ),
    (
        "nf4",
        "bits of another",
        lambda f: configure(
            f,
            lambda c: c["quantization_config"].update(
                load_in_4bit=False, _load_in_4bit=False, load_in_8bit=True, _load_in_8bit=True
            ),
        ),
        Planted("quantization_config", ("8 bits",)),
    ),
    (
        "llm_int8",
        "norms swapped",
        lambda f: change(
            f, lambda t: swap(t, "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
        ),
        Planted("model.layers.0.input_layernorm.weight", ("model.layers.1.input_layernorm",)),
    ),
    (
        "llm_int8",
        "weight missing",
        lambda f: change(f, lambda t: t.pop("model.layers.1.post_attention_layernorm.weight")),
        Planted("model.layers.1.post_attention_layernorm.weight", ("missing",)),
    ),
    ("llm_int8", "angle of another", lambda f: configure(f, other_angle), Planted("rope", ())),
    (
        "llm_int8",
        "heads of another",
        lambda f: configure(f, lambda c: c.update(num_attention_heads=8, num_key_value_heads=4, head_dim=8)),
        Planted("num_attention_heads", ("in the original 4",)),
    ),
    (
        "llm_int8",
        "fewer layers",
        lambda f: configure(f, lambda c: c.update(num_hidden_layers=1)),
        Planted("num_hidden_layers", ("further blocks",)),
    ),
    (
        "ternary",
        "scale too small",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight_scale", lambda s: s * 3)),
        Planted(UP, ("times what they should be",)),
    ),
    ("gguf", "file cut short", cut_short, Planted("model.gguf", ("cut short",))),
    ("gguf", "blocks swapped", swap_blocks, Planted(UP, ("holds what the original has as", OTHER))),
    (
        "gguf",
        "rows of another layout",
        lambda f: change_bytes(f, "blk.1.attn_k.weight", rotary_neighbours),
        Planted(K, ("rotary layout",)),
    ),
    (
        "gguf",
        "nibbles swapped",
        lambda f: change_bytes(f, "blk.1.ffn_up.weight", block_nibbles),
        Planted(UP, ("nibbles",)),
    ),
    (
        "gguf",
        "scale is no number",
        lambda f: change_bytes(f, "blk.1.ffn_up.weight", block_nan),
        Planted(UP, ("finite",)),
    ),
    ("gguf", "tensor missing", rename_tensor, Planted(UP, ("missing",))),
    (
        "plain",
        "head that is tied and differs",
        lambda f: change(f, lambda t: t.update({"lm_head.weight": torch.randn_like(t["model.embed_tokens.weight"])})),
        Planted("lm_head.weight", ("ties",)),
    ),
    (
        "plain",
        "transposed",
        lambda f: change(f, lambda t: put(t, f"{Q}.weight", lambda w: w.t())),
        Planted(Q, ("transposed",)),
    ),
    (
        "plain",
        "constant",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", torch.zeros_like)),
        Planted(UP, ("same",)),
    ),
    (
        "plain",
        "shape",
        lambda f: change(f, lambda t: put(t, f"{UP}.weight", lambda w: w[:100])),
        Planted(UP, ("shape",)),
    ),
    (
        "plain",
        "shard missing",
        lambda f: in_shards(f, lambda files: files[1].unlink()),
        Planted("model-00002-of-00002.safetensors", ("missing",)),
    ),
    (
        "plain",
        "index of another",
        lambda f: in_shards(
            f,
            lambda files: configure(
                f, lambda c: c["weight_map"].update({f"{UP}.weight": files[0].name}), "model.safetensors.index.json"
            ),
        ),
        Planted(UP, ("places it",)),
    ),
    ("plain", "tokens moved", lambda f: move_tokens(f), Planted("tokenizer.json", ("other numbers",))),
    (
        "plain",
        "template of another",
        lambda f: (f / "chat_template.jinja").write_text("{{ messages[0].content }}"),
        Planted("chat_template", ()),
    ),
)
