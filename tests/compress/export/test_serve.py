"""Pages about serving: commands and files for other engines, their keys, and what is said of what is not loaded."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from compress.artifact import manifest
from compress.errors import UserError
from compress.export import FORMATS
from compress.export.__main__ import app
from compress.export.serve import ENGINES, PAGE, module, sections, write
from compress.export.serve.check import check, check_section
from compress.export.serve.parts import Section
from compress.export.serve.run_facts import read
from runtime import formats
from runtime.cache import scheme as kv_scheme
from runtime.formats import fp8, int4, int8, nf4, ternary
from runtime.formats.packed import Scheme

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
LAYER = "model.layers.0.self_attn.q_proj"


def described(scheme: Scheme, **how: Any) -> dict[str, Any]:
    return {**CONFIG, "quantization_config": formats.hf_config({LAYER: scheme}, ["lm_head"], **how)}


KINDS: dict[str, dict[str, Any]] = {
    "nf4": described(nf4.scheme()),
    "int8-dynamic": described(int8.scheme()),
    "int4-g128": described(int4.scheme(128)),
    "int4-ordered": described(int4.scheme(32, symmetric=False), reordered=[LAYER]),
    "ternary": described(ternary.scheme()),
    "fp8": described(fp8.scheme()),
    "kv-int8": kv_scheme.to_config(CONFIG, "int8"),
    "kv-int3": kv_scheme.to_config(CONFIG, "int3", rotated=True),
    "int4-kv-int4": kv_scheme.to_config(described(int4.scheme(64)), "int4"),
    "pruned": CONFIG | {"num_hidden_layers": 2},
    "medusa": described(int8.scheme()),
    "mixtral": CONFIG | {"model_type": "mixtral", "num_local_experts": 4},
    "helium": CONFIG | {"model_type": "helium"},
}


def tokenizer(*words: str) -> str:
    vocabulary = {word: i for i, word in enumerate(words)}
    return json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}})


def a_run(tmp_path: Path, kind: str = "int4-g128", draft: bool = True, speed: dict[str, Any] | None = None) -> Path:
    """A run folder without weights: what pages are made from."""
    run = tmp_path / kind
    for name in ("model", *(["draft"] if draft else []), *(["medusa"] if kind == "medusa" else [])):
        (run / name).mkdir(parents=True)
        config = KINDS[kind] if name == "model" else CONFIG
        (run / name / "config.json").write_text(json.dumps(config))
        (run / name / "tokenizer.json").write_text(tokenizer("a", "b"))
    (run / "recipe.yaml").write_text("name: x\n")
    if speed is not None:
        (run / "report.json").write_text(json.dumps({"speed": speed}))
    manifest.write(run, {"model": "org/Model one", "recipe": kind})
    return run


def by_engine(run: Path) -> dict[str, Section]:
    return {section.engine: section for section in sections(read(run))}


def said(section: Section) -> str:
    return " ".join(section.lines)


def follows(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "draft"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_known_and_everything_parses(tmp_path: Path, kind: str, draft: bool) -> None:
    run = a_run(tmp_path, kind, draft)
    made = write(run)
    assert [section.engine for section in made] == list(ENGINES)
    page = (run / PAGE).read_text()
    for section in made:
        assert section.title in page and (section.loads or section.lines)
        for command in (*section.commands, *section.needs):
            assert command.line in page and tuple(shlex.split(command.line)) == command.words
            assert not any(word.startswith(("/", "~")) or "0.0.0.0" in word for word in command.words)
            assert not {"--host"} & set(command.words) or follows(command.words, "--host") == "127.0.0.1"
        for need in section.needs:
            assert "--to" not in need.words or follows(need.words, "--to") in FORMATS
        for file in section.files:
            text = (run / file.path).read_text()
            parsed = json.loads(text) if file.path.endswith(".json") else yaml.safe_load(text)
            assert parsed == json.loads(json.dumps(file.content)) and "0.0.0.0" not in text and "&id" not in text
        compile(section.code, section.engine, "exec")
    texts = [path.read_text() for path in [run / PAGE, *(run / "serve").iterdir()]]
    assert not any(str(tmp_path) in text for text in texts)
    results = check(run)
    assert not any(result.unknown for result in results)
    assert [bool(result.keys) for result in results] == [section.loads for section in made]
    manifest.verify(run)


def test_target_draft_and_length_are_this_runs(tmp_path: Path) -> None:
    advice = {"draft_length": 6, "why": "Six pays.", "band": "x"}
    run = a_run(tmp_path, speed={"draft_length": 4, "drafter": "model", "advice": advice})
    made = by_engine(run)
    speculative = made["vllm"].commands[1].words
    assert speculative[2] == "./model" and follows(speculative, "--served-model-name") == "Model-one-int4-g128"
    config = json.loads(follows(speculative, "--speculative-config"))
    assert config == {"method": "draft_model", "model": "./draft", "num_speculative_tokens": 6}
    chain = made["sglang"].commands[1].words
    # SGLang counts the token before the drafted ones.
    assert follows(chain, "--speculative-num-steps") == "6" and follows(chain, "--speculative-num-draft-tokens") == "7"
    assert follows(made["llama_cpp"].commands[1].words, "--spec-draft-n-max") == "6"
    assert made["onnxruntime"].files[0].content["speculative"] == {"max_draft_tokens": 6}
    application = made["ray_serve"].files[0].content["applications"][0]["args"]["llm_configs"][0]
    assert application["engine_kwargs"]["speculative_config"] == config
    write(run)
    assert "Six pays." in (run / PAGE).read_text()


def test_without_a_draft_the_text_drafts(tmp_path: Path) -> None:
    made = by_engine(a_run(tmp_path, "pruned", draft=False))
    config = json.loads(follows(made["vllm"].commands[1].words, "--speculative-config"))
    assert config["method"] == "ngram" and config["prompt_lookup_max"] == 4 and "model" not in config
    assert "NGRAM" in made["sglang"].commands[1].words
    assert made["tensorrt_llm"].files[0].content["speculative_config"]["decoding_type"] == "NGram"
    assert follows(made["llama_cpp"].commands[1].words, "--spec-type") == "ngram-simple"
    assert made["openvino"].files[0].content["pipeline"]["prompt_lookup"] is True
    assert made["onnxruntime"].files[0].content["speculative"]["ngram_size"] == 5


def test_with_plain_weights_every_engine_has_the_draft(tmp_path: Path) -> None:
    made = by_engine(a_run(tmp_path, "pruned"))
    assert all(section.loads for section in made.values())
    options = made["tensorrt_llm"].files[0].content["speculative_config"]
    assert options == {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "./draft"}
    pipeline = made["openvino"].files[0].content["pipeline"]
    assert pipeline["draft_model"] == "serve/openvino/draft" and "prompt_lookup" not in pipeline
    assert [need.words[0] for need in made["openvino"].needs] == ["optimum-cli", "optimum-cli"]


def test_a_draft_of_another_vocabulary_is_not_used(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert read(run).vocabulary == "same"
    (run / "draft" / "tokenizer.json").write_text(tokenizer("b", "a"))
    assert read(run).vocabulary == "different"
    made = by_engine(run)
    assert "ngram" in follows(made["vllm"].commands[1].words, "--speculative-config")
    assert all("vocabulary is not the target's" in said(made[name]) for name in ("vllm", "sglang", "llama_cpp"))
    (run / "draft" / "tokenizer.json").unlink()
    assert read(run).vocabulary == "unknown"
    assert "draft_model" in follows(by_engine(run)["vllm"].commands[1].words, "--speculative-config")


def test_advice_against_speculation_is_passed_on(tmp_path: Path) -> None:
    advice = {"draft_length": 0, "why": "It does not pay.", "band": "x"}
    run = a_run(tmp_path, speed={"draft_length": 3, "drafter": "model", "advice": advice})
    facts = read(run)
    assert (facts.length, facts.pays) == (3, False)
    write(run)
    assert "So take the plain commands" in (run / PAGE).read_text()


def test_medusa_heads_are_named_as_unused_and_their_length_is_not_taken(tmp_path: Path) -> None:
    advice = {"draft_length": 9, "why": "Nine pay.", "band": "x"}
    run = a_run(tmp_path, "medusa", speed={"draft_length": 4, "drafter": "medusa", "advice": advice})
    assert read(run).length == 4
    made = by_engine(run)
    assert all(
        "Medusa" in said(section) for section in made.values() if section.loads and section.engine != "ray_serve"
    )


def test_what_engines_do_not_load(tmp_path: Path) -> None:
    nf4_run, bitnet = by_engine(a_run(tmp_path, "nf4")), by_engine(a_run(tmp_path, "ternary"))
    assert not nf4_run["vllm"].loads and "bitsandbytes" in said(nf4_run["vllm"]) and "CPU" in said(nf4_run["vllm"])
    assert not nf4_run["ray_serve"].loads
    assert nf4_run["sglang"].loads and "GPUs only" in said(nf4_run["sglang"])
    assert not nf4_run["tensorrt_llm"].loads and "Model-Optimizer" in said(nf4_run["tensorrt_llm"])
    assert "no bitnet" in said(bitnet["vllm"]) and bitnet["vllm"].commands[0].words[2].startswith("./exports/")
    assert not bitnet["openvino"].loads and "ternary" in said(bitnet["openvino"])
    caches = by_engine(a_run(tmp_path, "kv-int8"))
    assert not caches["vllm"].loads and "kv_cache_scheme" in said(caches["vllm"])
    assert caches["sglang"].loads and "ignored" in said(caches["sglang"])
    assert "--cache-type-k" in caches["llama_cpp"].commands[0].words
    three = by_engine(a_run(tmp_path, "kv-int3"))["llama_cpp"]
    assert "q4_0" in three.commands[0].words and "not the run's int3" in said(three)
    both = by_engine(a_run(tmp_path, "int4-kv-int4"))
    # GPTQ's layout has no place for the scheme that vLLM stops at.
    assert both["vllm"].commands[0].words[2] == "./exports/gptq" and both["vllm"].needs
    assert not by_engine(a_run(tmp_path, "helium"))["llama_cpp"].loads


def test_forms_that_are_there_need_not_be_made(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    before = by_engine(run)["llama_cpp"]
    assert [need.words[3:] for need in before.needs] == [
        (".", "--to", "gguf"),
        ("draft", "--to", "gguf", "--out", "serve/draft"),
    ]
    for folder in ("exports/gguf", "serve/draft/gguf"):
        (run / folder).mkdir(parents=True)
        (run / folder / "export.json").write_text("{}")
    after = by_engine(run)["llama_cpp"]
    assert after.needs == () and after.commands == before.commands


def test_parallel_sizes_fit_the_model(tmp_path: Path) -> None:
    made = by_engine(a_run(tmp_path, "mixtral"))
    assert "--enable-expert-parallel" in made["vllm"].commands[2].words
    assert follows(made["sglang"].commands[2].words, "--ep-size") == "2"
    cut = made["ray_serve"].files[1].content["applications"][0]["args"]["llm_configs"][0]
    assert cut["engine_kwargs"] == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "enable_expert_parallel": True,
    }
    assert cut["deployment_config"]["num_replicas"] == 2
    run = a_run(tmp_path, "pruned")
    (run / "model" / "config.json").write_text(json.dumps(KINDS["pruned"] | {"num_key_value_heads": 1}))
    assert read(run).tensor_parallel == 1
    assert "stays at 1" in said(by_engine(run)["vllm"])


def test_the_command_checks_and_names_unknown_keys(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    result = CliRunner().invoke(app, [str(run), "--check"])
    assert result.exit_code == 0, result.output
    assert (run / PAGE).is_file()
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == [module(name).TITLE for name in ENGINES]
    assert "documented keys of vLLM 0.33.0; vllm is not installed" in result.stdout or "asked the" in result.stdout
    path = run / "serve" / "ray.yaml"
    # A port is the user's to choose; a key is not.
    path.write_text(path.read_text().replace("port: 8000", "port: 9000"))
    assert CliRunner().invoke(app, [str(run / "model"), "--check"]).exit_code == 0
    path.write_text(path.read_text().replace("num_speculative_tokens", "speculative_tokens"))
    result = CliRunner().invoke(app, [str(run), "--check"])
    assert result.exit_code == 2 and "speculative_config: speculative_tokens" in result.stdout
    assert result.stderr.startswith("error: Ray Serve LLM: expected keys") and "Traceback" not in result.output


@pytest.mark.parametrize("text", ["applications: [", "- 1\n"], ids=["no YAML", "no mapping"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    run = a_run(tmp_path)
    write(run)
    (run / "serve" / "ray.yaml").write_text(text)
    with pytest.raises(UserError, match=r"serve/ray\.yaml"):
        check(run)


def test_only_runs_have_a_page(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(CONFIG))
    result = CliRunner().invoke(app, [str(tmp_path / "plain"), "--check"])
    assert result.exit_code == 2 and "expected a run folder" in result.stderr
    assert not (tmp_path / PAGE).exists()


def test_writing_again_gives_equal_bytes_and_leaves_nothing_old(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    write(run)
    before = {path.name: path.read_bytes() for path in [run / PAGE, *(run / "serve").iterdir()]}
    (run / "serve" / "gone.yaml").write_text("a: 1\n")
    (run / "serve" / "mine.txt").write_text("kept")
    write(run)
    after = {path.name: path.read_bytes() for path in [run / PAGE, *(run / "serve").iterdir()]}
    assert after == before | {"mine.txt": b"kept"}


def test_an_installed_engine_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = by_engine(a_run(tmp_path))["openvino"]
    names = ("max_new_tokens", "max_ngram_size", "num_assistant_tokens")
    functions = {"LLMPipeline": None, "draft_model": None}

    def engine(*names: str) -> SimpleNamespace:
        return SimpleNamespace(GenerationConfig=lambda: SimpleNamespace(**dict.fromkeys(names)), **functions)

    monkeypatch.setitem(sys.modules, "openvino_genai", engine(*names))
    found = check_section(section)
    assert not found.unknown and found.against.startswith("asked the installed OpenVINO GenAI itself")
    monkeypatch.setitem(sys.modules, "openvino_genai", engine(*names[1:]))
    assert check_section(section).unknown == ("generation_config: max_new_tokens",)


@pytest.mark.parametrize(
    ("engine", "package"),
    [
        ("vllm", "vllm"),
        ("sglang", "sglang.srt.server_args"),
        ("openvino", "openvino_genai"),
        ("onnxruntime", "onnxruntime_genai"),
        ("ray_serve", "ray.serve.schema"),
        ("llama_cpp", "llama_cpp.server.settings"),
    ],
)
def test_the_real_engine_knows_the_keys(tmp_path: Path, engine: str, package: str) -> None:
    """None of these is among the test requirements: it runs where one is installed."""
    pytest.importorskip(package, exc_type=ImportError)
    for kind in ("pruned", "int4-g128"):
        for draft in (False, True):
            section = by_engine(a_run(tmp_path / f"{kind}{draft}", kind, draft))[engine]
            found = check_section(section)
            assert not found.unknown and found.against.startswith("asked the installed")


def test_fp8_goes_to_engines_that_read_compressed_tensors(tmp_path: Path) -> None:
    found = by_engine(a_run(tmp_path, "fp8", draft=False))
    assert found["vllm"].loads and "Runs on GPUs" in said(found["vllm"])
    assert found["sglang"].loads and "Runs on GPUs." in said(found["sglang"])
    for engine in ("llama_cpp", "onnxruntime"):
        assert not found[engine].loads and "fp8 weights are not exported" in said(found[engine])
