"""Who says what each `model_type` is: a function from config.json's values to the record, or None where it is a variant
that our decoders do not run."""

from collections.abc import Callable

from runtime.checkpoints.families import classic, dense, gemma, latent, mixtures, state_space, stateful
from runtime.checkpoints.families.common import Config
from runtime.checkpoints.families.llama import first
from runtime.checkpoints.record import Architecture

# Those whose blocks have one form and one set of names, fused or not: some stages and exports take these alone.
LLAMA = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "mixtral", "qwen3_moe")
FAMILIES: dict[str, Callable[[Config], Architecture | None]] = {
    **dict.fromkeys(LLAMA, first),
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma2,
    "gemma4_text": gemma.gemma4,
    "vaultgemma": dense.gemma2,
    "cwm": dense.windowed,
    "smollm3": dense.smollm3,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo2,
    "granite": dense.granite,
    "glm4": dense.glm4,
    "ministral": dense.windowed,
    "ministral3": dense.ministral3,
    "seed_oss": dense.plain,
    "internlm3": dense.plain,
    "arcee": dense.ungated,
    "exaone4": dense.exaone4,
    "ernie4_5": dense.neighbours,
    "helium": dense.neighbours,
    "hunyuan_v1_dense": dense.hunyuan,
    "starcoder2": dense.starcoder2,
    "stablelm": dense.stablelm,
    "phi": dense.phi,
    "cohere2": dense.cohere2,
    "cohere2_moe": mixtures.cohere2_moe,
    "nemotron": dense.nemotron,
    "apertus": dense.apertus,
    "gpt2": classic.gpt2,
    "opt": classic.opt,
    "gpt_neox": classic.gpt_neox,
    "falcon": classic.falcon,
    "olmoe": mixtures.olmoe,
    "qwen2_moe": mixtures.qwen2_moe,
    "granitemoe": mixtures.granitemoe,
    "glm4_moe": mixtures.glm4_moe,
    "dots1": mixtures.dots1,
    "exaone_moe": mixtures.exaone_moe,
    "ernie4_5_moe": mixtures.ernie4_5_moe,
    "hunyuan_v1_moe": mixtures.hunyuan_moe,
    "llama4_text": mixtures.llama4,
    "phimoe": mixtures.phimoe,
    "minimax_m2": mixtures.minimax_m2,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "glm4_moe_lite": latent.glm4_moe_lite,
    "youtu": latent.youtu,
    "gpt_oss": mixtures.gpt_oss,
    "lfm2": stateful.lfm2,
    "lfm2_moe": stateful.lfm2_moe,
    "qwen3_next": stateful.qwen3_next,
    "qwen3_5_text": stateful.qwen3_5,
    "qwen3_5_moe_text": stateful.qwen3_5_moe,
    "mamba2": state_space.mamba2,
    "nemotron_h": state_space.nemotron_h,
    "granitemoehybrid": state_space.granitemoehybrid,
    "falcon_h1": state_space.falcon_h1,
}
