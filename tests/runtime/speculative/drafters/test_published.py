"""Drafters of published heads: their drafts against a plain computation, texts that no head changes, refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from runtime import Model, Speculator, load
from runtime.engine.metrics import total
from runtime.errors import UserError
from runtime.sampling.params import Sampling
from runtime.speculate import CacheOptions
from runtime.speculative.draft import Request, TakenStates
from runtime.speculative.drafters.by_name import drafter_by_name, make
from runtime.speculative.drafters.published import PublishedDrafter
from runtime.speculative.heads.load import load_head
from runtime.speculative.verify import require_sound
from tests.runtime.speculative.heads.published import CONFIGS, HIDDEN, LAYERS, VOCAB, speculators, write_head

Tiny = Callable[..., Path]
TinyPacked = Callable[[str], Path]
PROMPTS = ["def f(x):", "import os", "a", "class Tree:\n    def"]
KINDS = {"SpecForge": "eagle3", "z-lab": "dflash", "SpecForge-dspark": "dspark", "DeepSpec": "dflash"} | {
    "DeepSpec-eagle3": "eagle3"
}


@pytest.fixture(scope="module")
def target(tiny_packed: TinyPacked) -> Model:
    return load(tiny_packed("int8"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random head of every layout."""
    made = tmp_path_factory.mktemp("heads")
    return {name: write_head(made / name, values) for name, values in CONFIGS.items()}


def drafter_of(target: Model, folders: dict[str, Path], name: str, verify: Any = "coupled") -> PublishedDrafter:
    found = make(target, KINDS.get(name, name), verify=verify, heads=folders[name])
    assert isinstance(found, PublishedDrafter)
    return found


# Drafts, against a plain computation of whole sequences in float64.


class Plain:
    """A head over whole sequences: no memory, no passes, nothing of the product's but the file's tensors."""

    def __init__(self, folder: Path, target: Model) -> None:
        self.t = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        source = load_file(target.path / "model.safetensors")
        table = source["model.embed_tokens.weight"].double()
        self.table = self.t.get("embed_tokens.weight", table)
        self.head = self.t.get("lm_head.weight", table)
        self.final = source["model.norm.weight"].double()
        self.eps = json.loads((target.path / "config.json").read_text())["rms_norm_eps"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.t[f"{name}.weight"], 1e-5)

    def turned(self, x: Tensor, at: Tensor) -> Tensor:
        """Rotary positions: x (T, heads, 16) as complex numbers of its halves."""
        angle = at[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        found = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat((found.real, found.imag), dim=-1)

    def block(self, x: Tensor, read: Tensor, place: str, seen: Tensor, context: Tensor | None = None) -> Tensor:
        """A block over rows x whose projections read `read`; context: rows before them that only keys see."""
        own = read if context is None else torch.cat((context, read))
        at = torch.arange(len(own), dtype=torch.float64)
        q, k, v = (
            (part @ self.t[f"{place}.self_attn.{name}_proj.weight"].T).view(len(part), -1, 16)
            for name, part in (("q", read), ("k", own), ("v", own))
        )
        q, k = self.norm(q, f"{place}.self_attn.q_norm"), self.norm(k, f"{place}.self_attn.k_norm")
        q, k = self.turned(q, at[-len(read) :]), self.turned(k, at)
        mixed = []
        for head in range(4):
            scores = (q[:, head] @ k[:, head // 2].T / 4).masked_fill(~seen, -torch.inf)
            mixed.append(scores.softmax(-1) @ v[:, head // 2])
        x = x + torch.cat(mixed, -1) @ self.t[f"{place}.self_attn.o_proj.weight"].T
        y = self.norm(x, f"{place}.post_attention_layernorm")
        up = silu(y @ self.t[f"{place}.mlp.gate_proj.weight"].T) * (y @ self.t[f"{place}.mlp.up_proj.weight"].T)
        return x + up @ self.t[f"{place}.mlp.down_proj.weight"].T

    def eagle(self, tokens: list[int], states: Tensor, steps: int) -> list[Tensor]:
        """Logits of a chain, each step after the whole text again, whose rows are the same every time."""
        hidden, found, tokens = states @ self.t["fc.weight"].T, [], tokens[1:]
        for _ in range(steps):
            e = self.norm(self.table[tokens], "layers.0.input_layernorm")
            read = torch.cat((e, self.norm(hidden, "layers.0.hidden_norm")), -1)
            x = self.block(hidden, read, "layers.0", torch.ones(len(read), len(read)).tril().bool())
            found.append(self.norm(x[-1:], "norm") @ self.head.T)
            hidden = torch.cat((hidden, x[-1:]))
            tokens = [*tokens, self.token(found[-1])]
        return found

    def mtp(self, tokens: list[int], states: Tensor, steps: int) -> list[Tensor]:
        hidden, found = rms_norm(states, (HIDDEN,), self.final, self.eps), []
        tokens = tokens[1:]
        for _ in range(steps):
            pair = (
                self.norm(self.table[tokens], "mtp_layers.0.token_layernorm"),
                self.norm(hidden, "mtp_layers.0.hidden_layernorm"),
            )
            x = torch.cat(pair, -1) @ self.t["mtp_layers.0.input_proj.weight"].T
            read = self.norm(x, "mtp_layers.0.input_layernorm")
            x = self.block(x, read, "mtp_layers.0", torch.ones(len(read), len(read)).tril().bool())
            out = self.norm(x[-1:], "mtp_layers.0.final_layernorm")
            found.append(out @ self.head.T)
            hidden, tokens = torch.cat((hidden, out)), [*tokens, self.token(found[-1])]
        return found

    def dflash(self, tokens: list[int], states: Tensor, steps: int) -> list[Tensor]:
        context = self.norm(states @ self.t["fc.weight"].T, "hidden_norm")
        x = self.table[[tokens[-1], *[7] * 7]]
        for number in range(2):
            place = f"layers.{number}"
            seen = torch.ones(8, len(context) + 8).bool()
            x = self.block(x, self.norm(x, f"{place}.input_layernorm"), place, seen, context)
        return list((self.norm(x, "norm") @ self.head.T)[1 : steps + 1].split(1))

    def token(self, logits: Tensor) -> int:
        best = int(logits.argmax())
        return best + int(self.t["d2t"][best]) if "d2t" in self.t else best


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "dflash"])
def test_drafts_are_those_of_a_plain_computation(target: Model, folders: dict[str, Path], kind: str) -> None:
    drafter, plain = drafter_of(target, folders, kind), Plain(folders[kind], target)
    generator, seen = torch.Generator().manual_seed(5), []
    tokens = torch.randint(0, VOCAB, (40,), generator=generator).tolist()
    states = torch.randn((39, len(drafter.taps) * HIDDEN), generator=generator)
    choose = drafter._choose
    drafter._choose = lambda logits, drafts: (seen.append(logits), choose(logits, drafts))[1]  # type: ignore[assignment, func-returns-value]
    other, found = request(list(range(9)), 1), []
    drafter.read([TakenStates(other, 0, states[:8])])
    for start, end in ((0, 17), (17, 18), (18, 39)):
        one = request(tokens[: end + 1])
        drafter.read([TakenStates(one, start, states[start:end])])
        seen.clear()
        # Drafts are forgotten, and another text in the same passes is none of this one's.
        asked = [one, other] if start == 18 else [one]
        found = drafter.propose(asked, [5, 3][: len(asked)])
    require_sound(found[0], 5, VOCAB)
    expected = getattr(plain, {"eagle3": "eagle", "mtp": "mtp", "dflash": "dflash"}[kind])(tokens, states.double(), 5)
    assert len(found[0].tokens) == 5 and len(found[1].tokens) == 3
    for ours, theirs in zip(seen, expected, strict=True):
        # The target's kernels may hold a float table as bfloat16.
        assert (ours[0].double() - theirs[0]).norm() < 1e-2 * theirs.norm()
    assert found[0].tokens == [plain.token(row) for row in expected]


def request(tokens: list[int], id_: int = 0, **options: Any) -> Request:
    return Request(id_, tokens, len(tokens), Sampling(**options), 50)


# Texts.


SAMPLING = [
    Sampling(),
    *(Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=seed) for seed in (1, 2, 3)),
]


@pytest.fixture(scope="module")
def texts(target: Model) -> list[list[int]]:
    """What plain decoding writes: one greedy text, and three that are sampled."""
    return [result.tokens for result in Speculator(target).generate(PROMPTS, 20, SAMPLING, stop=())]


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_are_those_of_plain_decoding(
    target: Model, folders: dict[str, Path], texts: list[list[int]], name: str
) -> None:
    speculator = Speculator(target, drafter_of(target, folders, name), 5, max_batch=3)
    found = speculator.generate(PROMPTS, 20, SAMPLING, stop=())
    assert [result.tokens for result in found] == texts
    measured = total([result.metrics for result in found])
    # The states are known from the prompt's end on: every round drafts but those that need no draft.
    assert measured.drafted > 2 * (measured.rounds - len(PROMPTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "peagle", "dspark", "mtp"])
def test_texts_on_plain_torch(tiny_packed: TinyPacked, folders: dict[str, Path], name: str) -> None:
    target = load(tiny_packed("int8"), kernels="plain-torch")
    expected = Speculator(target).generate(PROMPTS[:2], 12, SAMPLING[1:3], stop=())
    found = Speculator(target, drafter_of(target, folders, name), 4).generate(PROMPTS[:2], 12, SAMPLING[1:3], stop=())
    assert [result.tokens for result in found] == [result.tokens for result in expected]


def test_paged_caches_and_rounds_whose_length_is_chosen(target: Model, folders: dict[str, Path]) -> None:
    expected = Speculator(target, cache=CacheOptions("int8")).generate(PROMPTS, 20, stop=())
    for name in ("eagle3", "dspark"):
        made = make(target, f"lookup+{name}", heads=folders[name])
        found = Speculator(target, made, cache=CacheOptions("int8", 8), max_batch=4).generate(PROMPTS, 20, stop=())
        assert [result.tokens for result in found] == [result.tokens for result in expected]


def test_prompts_are_read_in_pieces(target: Model, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, VOCAB, (61,), generator=torch.Generator().manual_seed(1)).tolist()
    for name in ("eagle3", "peagle", "dflash"):
        drafts = []
        for piece in (512, 7):
            monkeypatch.setattr("runtime.speculative.drafters.published._PIECE", piece)
            drafter = drafter_of(target, folders, name)
            states = torch.randn((60, len(drafter.taps) * HIDDEN), generator=torch.Generator().manual_seed(2))
            one = request(tokens)
            drafter.read([TakenStates(one, 0, states)])
            drafts.append(drafter.propose([one], [4])[0].tokens)
        assert drafts[0] == drafts[1] and len(drafts[0]) == 4


@pytest.mark.parametrize("name", ["eagle3", "peagle", "mtp", "dflash"])
def test_states_that_never_came_leave_a_gap(target: Model, folders: dict[str, Path], name: str) -> None:
    """Whether a draft was asked for before the gap or not, and not as if nothing stood before it."""
    tokens = torch.randint(0, VOCAB, (31,), generator=torch.Generator().manual_seed(1)).tolist()
    width = len(drafter_of(target, folders, name).taps) * HIDDEN
    states = torch.randn((30, width), generator=torch.Generator().manual_seed(2))

    def last_logits(pieces: list[tuple[int, int]], asked: bool) -> Tensor:
        drafter, seen = drafter_of(target, folders, name), list[Tensor]()
        choose = drafter._choose
        drafter._choose = lambda logits, drafts: (seen.append(logits), choose(logits, drafts))[1]  # type: ignore[assignment, func-returns-value]
        for first, end in pieces:
            one = request(tokens[: end + 1])
            drafter.read([TakenStates(one, first, states[first:end])])
            if asked or end == 30:
                drafter.propose([one], [3])
        return seen[-1]

    pieces = [(0, 9), (9, 12), (17, 18), (25, 30)]
    assert torch.allclose(last_logits(pieces, True), last_logits(pieces, False), atol=1e-4)
    assert not torch.allclose(last_logits(pieces, True), last_logits(pieces[-1:], True), atol=1e-2)


def test_without_states_there_is_no_draft(target: Model, folders: dict[str, Path]) -> None:
    drafter, one = drafter_of(target, folders, "eagle3"), request([1, 2, 3, 4, 5])
    states = torch.randn(4, 3 * HIDDEN)
    assert drafter.propose([one], [3])[0].tokens == []
    drafter.read([TakenStates(one, 0, states[:2])])
    assert drafter.propose([one], [3])[0].tokens == []
    # A beginning that the cache knew is never read: what follows it does.
    drafter.read([TakenStates(one, 3, states[3:])])
    assert len(drafter.propose([one], [3])[0].tokens) == 3
    # Nothing was read since.
    assert drafter.propose([one], [3])[0].tokens == []
    drafter.close(one)
    drafter.read([TakenStates(one, 0, states)])
    assert len(drafter.propose([one], [2])[0].tokens) == 2


def test_rejection_gets_the_distribution_of_the_draft_vocabulary(target: Model, folders: dict[str, Path]) -> None:
    for name in ("eagle3", "peagle"):
        drafter = drafter_of(target, folders, name, "rejection")
        one = request([1, 2, 3], temperature=1.0)
        drafter.read([TakenStates(one, 0, torch.randn(2, len(drafter.taps) * HIDDEN))])
        draft = drafter.propose([one], [4])[0]
        require_sound(draft, 4, VOCAB)
        assert draft.probs is not None and draft.probs.shape == (4, VOCAB)
        known = [token for token in range(VOCAB) if name == "peagle" or token % 5 == 0]
        assert int((draft.probs > 0).sum()) == 4 * len(known) and set(draft.tokens) <= set(known)


# By name, and what is refused.


def test_a_head_is_found_by_its_configuration(target: Model, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        for asked in (None, KINDS.get(name, name)):
            chosen = drafter_by_name(target, asked, folder)
            assert chosen.drafter is not None and chosen.drafter.name == KINDS.get(name, name)  # type: ignore[union-attr]
            assert chosen.note == f" ({folder.name})"
    with pytest.raises(UserError, match="needs a head that was made for int8; give --draft DIR"):
        drafter_by_name(target, "eagle3")
    with pytest.raises(UserError, match="a head for the drafter dflash, not for eagle3; give --drafter dflash"):
        drafter_by_name(target, "eagle3", folders["z-lab"])
    with pytest.raises(UserError, match="brings no multi-token prediction"):
        drafter_by_name(target, "mtp")
    with pytest.raises(UserError, match="no draft head that is known"):
        drafter_by_name(target, "eagle3", target.path)


def changed(values: dict[str, Any], **below: Any) -> dict[str, Any]:
    return {**values, "transformer_layer_config": {**values["transformer_layer_config"], **below}}


E3 = CONFIGS["eagle3"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (changed(E3, hidden_size=32), r"of \(32, 320\) does not fit int8, which has \(64, 320\)"),
        (changed(E3, vocab_size=640), r"of \(64, 640\) does not fit int8"),
        (E3 | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "behind 1, 2, 3 layers, and int8 has 2"),
        (E3 | {"eagle_aux_hidden_state_layer_ids": None}, "behind 2, 1, -1 layers, and int8 has 2"),
        (E3 | {"eagle_aux_hidden_state_layer_ids": "2"}, "must be a list of layers, found '2'"),
        (changed(E3, model_type="mixtral"), "are of model_type llama, .*, found 'mixtral'"),
        (changed(E3, num_key_value_heads=3), "must divide num_attention_heads"),
        (changed(E3, hidden_act="relu"), "hidden_act must be one of silu"),
        (changed(E3, intermediate_size="many"), "layers cannot be read"),
        (CONFIGS["dflash"] | {"mask_token_id": 320}, "the mask token 320 is beyond the vocabulary of 320"),
        (CONFIGS["dflash"] | {"mask_token_id": None}, "mask_token_id must be a whole number of at least 0, found None"),
        (CONFIGS["dspark"] | {"markov_head_type": "deep"}, "markov_head_type must be one of vanilla, gated, rnn"),
        ({**CONFIGS["z-lab"], "dflash_config": {"mask_token_id": 1}}, "target_layer_ids names no layers"),
    ],
)
def test_heads_for_others_and_wrong_configurations(
    target: Model, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    kind = values.get("speculators_model_type", "dflash")
    good = CONFIGS.get(kind, E3)
    folder = write_head(tmp_path / "good", good)
    load_head(folder, kind, target)
    try:
        folder = write_head(tmp_path / "bad", values)
    except UserError:
        (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=said) as error:
        load_head(folder, kind, target)
    assert "\n" not in str(error.value)


def test_wrong_tensors(target: Model, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["eagle3"] / "model.safetensors")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"fc.weight": None}, "implies the tensor fc.weight of shape .*, found none"),
        ({"fc.weight": torch.ones(64, 128)}, r"found \(64, 128\); the files do not belong together"),
        ({"layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, "mixtures of experts are not run in heads"),
        ({"layers.0.extra": torch.ones(2)}, "the tensor layers.0.extra is none of a eagle3 head of speculators"),
        ({"d2t": torch.full((64,), 300)}, "d2t names tokens beyond the vocabulary of 320"),
    ]
    for number, (change, said) in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(E3))
        kept = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(kept | {"t2d": torch.ones(VOCAB)}, folder / "model.safetensors")
        with pytest.raises(UserError, match=said):
            load_head(folder, "eagle3", target)
    (folder / "config.json").write_text(json.dumps(E3 | {"quantization_config": {"bits": 4}}))
    with pytest.raises(UserError, match="the head is quantised"):
        load_head(folder, "eagle3", target)


def test_a_target_that_transformers_runs_gives_no_states(folders: dict[str, Path], tiny: Tiny) -> None:
    with pytest.raises(UserError, match="use another drafter"):
        load_head(folders["eagle3"], "eagle3", load(tiny("gpt2")))


@pytest.mark.parametrize("residual", [64, 0])
def test_a_target_whose_states_are_rotated_takes_no_head_of_its_original(
    residual: int, folders: dict[str, Path], target: Model, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(target.path, tmp_path / "rotated"))
    config = json.loads((folder / "config.json").read_text())
    config["specpress"] = {"rotation": {"residual": residual, "values": 16, "seed": 0, "untied": False}}
    (folder / "config.json").write_text(json.dumps(config))
    if residual:
        with pytest.raises(UserError, match="those of rotated are rotated; use another drafter"):
            load_head(folders["eagle3"], "eagle3", load(folder))
    else:
        assert load_head(folders["eagle3"], "eagle3", load(folder))


def test_a_narrow_head_needs_tables_of_its_own(target: Model, tmp_path: Path) -> None:
    values = speculators("dflash", draft_vocab_size=VOCAB, aux_hidden_state_layer_ids=[1], mask_token_id=7)
    values = changed(values, hidden_size=32) | {"target_hidden_size": HIDDEN}
    with pytest.raises(UserError, match="needs embeddings of its own"):
        load_head(write_head(tmp_path / "head", values), "dflash", target)
    assert LAYERS["hidden_size"] == HIDDEN
