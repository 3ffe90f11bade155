import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.corpora import Corpus, load
from calib.errors import UserError
from calib.token_bytes import encode_with_bytes
from calib.windows import make_windows, start_token

END = 0


def texts(count: int, seed: int, words: int = 300) -> list[str]:
    """Documents that no other shares a word with."""
    chooser = random.Random(seed)
    return [
        " ".join(f"doc{i}" + "".join(chooser.choices("abcdefgh\n", k=6)) for _ in range(chooser.randint(40, words)))
        for i in range(count)
    ]


def corpus_of(documents: list[str]) -> Corpus:
    return Corpus("some text", tuple(documents), "0" * 64)


def runs(window: torch.Tensor) -> list[list[int]]:
    """A window's tokens between separators."""
    parts: list[list[int]] = [[]]
    for token in window.tolist():
        if token == END:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def test_windows_are_text_of_disjoint_documents(tokenizer) -> None:
    documents = texts(30, seed=1)
    windows = make_windows(
        corpus_of(documents), tokenizer, length=64, calibration=20, evaluation_tokens=640, seed=0, separator=END
    )
    assert windows.calibration.shape == (20, 64)
    assert windows.evaluation.shape == (10, 64)
    assert windows.calibration.dtype == windows.evaluation.dtype == torch.int64
    streams = [",".join(map(str, encode_with_bytes(tokenizer, text)[0])) + "," for text in documents]
    homes: dict[str, set[int]] = {"calibration": set(), "evaluation": set()}
    for part, rows in (("calibration", windows.calibration), ("evaluation", windows.evaluation)):
        for row in rows:
            for run in runs(row):
                if len(run) > 12:
                    text = ",".join(map(str, run)) + ","
                    (home,) = [i for i, stream in enumerate(streams) if text in stream]
                    homes[part].add(home)
    assert not homes["calibration"] & homes["evaluation"]
    # Spread: ten windows are drawn from more than a few documents.
    assert len(homes["evaluation"]) >= 5


def test_windows_of_one_part_do_not_overlap(tokenizer) -> None:
    # Words that occur once, so that equal runs of tokens are the same place.
    documents = [" ".join(f"{i:03}x{j:05}" for j in range(400)) for i in range(12)]
    windows = make_windows(
        corpus_of(documents), tokenizer, length=48, calibration=40, evaluation_tokens=48 * 20, seed=3, separator=END
    )
    seen: set[str] = set()
    for row in [*windows.calibration, *windows.evaluation]:
        words = {word for word in tokenizer.decode(row).replace("<|end|>", " ").split(" ")[1:-1] if len(word) == 9}
        assert words
        assert not words & seen
        seen |= words


def test_same_seed_same_windows_and_evaluation_ignores_calibration(tokenizer) -> None:
    corpus = load("stdlib")
    corpus = replace(corpus, documents=corpus.documents[3:20])

    def make(seed: int, calibration: int):
        return make_windows(
            corpus, tokenizer, length=128, calibration=calibration, evaluation_tokens=1024, seed=seed, separator=END
        )

    first, again, other, uncalibrated = make(0, 12), make(0, 12), make(1, 12), make(0, 0)
    assert torch.equal(first.calibration, again.calibration)
    assert torch.equal(first.evaluation, again.evaluation)
    assert not torch.equal(first.evaluation, other.evaluation)
    assert torch.equal(first.evaluation, uncalibrated.evaluation)
    assert torch.equal(first.evaluation_bytes, uncalibrated.evaluation_bytes)
    assert uncalibrated.calibration.shape == (0, 128)


@pytest.mark.parametrize("with_separator", [True, False])
def test_bytes_are_those_of_the_predicted_text(tokenizer, with_separator) -> None:
    windows = make_windows(
        corpus_of(texts(20, seed=2)),
        tokenizer,
        length=40,
        calibration=2,
        evaluation_tokens=400,
        seed=0,
        separator=END if with_separator else None,
    )
    for row, size in zip(windows.evaluation, windows.evaluation_bytes, strict=True):
        text = tokenizer.decode(row[1:], skip_special_tokens=True)
        assert len(text.encode()) == size


def test_a_start_token_begins_every_window(starting_tokenizer, tokenizer) -> None:
    assert start_token(starting_tokenizer) == 0
    assert start_token(tokenizer) is None
    windows = make_windows(
        corpus_of(texts(20, seed=2)), starting_tokenizer, length=40, calibration=3, evaluation_tokens=400, seed=0
    )
    assert (windows.evaluation[:, 0] == 0).all() and (windows.calibration[:, 0] == 0).all()
    assert (windows.evaluation[:, 1:] != 0).all()
    for row, size in zip(windows.evaluation, windows.evaluation_bytes, strict=True):
        assert len(starting_tokenizer.decode(row[1:]).encode()) == size


def test_one_document_is_cut_in_two(tokenizer) -> None:
    words = [f"{i:05}" for i in range(4000)]
    windows = make_windows(
        corpus_of([" ".join(words)]), tokenizer, length=64, calibration=8, evaluation_tokens=256, seed=0, separator=END
    )
    parts = []
    for rows in (windows.calibration, windows.evaluation):
        text = " ".join(tokenizer.decode(row, skip_special_tokens=True) for row in rows)
        parts.append([int(word) for word in text.split() if len(word) == 5])
    assert max(parts[0]) < min(parts[1])


def test_a_dominant_document_is_left_to_calibration(tokenizer) -> None:
    documents = [*texts(9, seed=4), "enormous " * 20_000]
    windows = make_windows(
        corpus_of(documents), tokenizer, length=64, calibration=4, evaluation_tokens=640, seed=0, separator=END
    )
    assert all("enormous" not in tokenizer.decode(row) for row in windows.evaluation)


def test_what_was_used_is_counted(tokenizer) -> None:
    documents = texts(4, seed=5, words=80)
    windows = make_windows(
        corpus_of(documents), tokenizer, length=64, calibration=1000, evaluation_tokens=64_000, seed=0, separator=END
    )
    assert 0 < len(windows.calibration) < 1000
    assert 0 < len(windows.evaluation) < 1000


def test_too_short_a_text_says_how_much_is_there(tokenizer) -> None:
    corpus = corpus_of(["only a few words here"])
    total = sum(len(encode_with_bytes(tokenizer, part)[0]) for part in ("only a few words here",))
    with pytest.raises(UserError, match=r"some text is too short: of its \d+ tokens .* one window needs 64") as raised:
        make_windows(corpus, tokenizer, length=64, calibration=1, evaluation_tokens=64, seed=0)
    assert abs(int(str(raised.value).split("of its ")[1].split()[0]) - total) <= 2
    enough = corpus_of(["only a few words here, again and again. " * 40])
    one = make_windows(enough, tokenizer, length=64, calibration=1, evaluation_tokens=64, seed=0)
    assert len(one.evaluation) == 1


@pytest.mark.parametrize("wrong", [{"length": 1}, {"calibration": -1}, {"evaluation_tokens": 63}])
def test_impossible_requests(tokenizer, wrong) -> None:
    request = {"length": 64, "calibration": 1, "evaluation_tokens": 64, **wrong}
    with pytest.raises(UserError, match="expected"):
        make_windows(corpus_of(texts(9, seed=1)), tokenizer, seed=0, **request)


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=60))
def test_bytes_add_up_and_belong_to_their_tokens(tokenizer, text) -> None:
    ids, sizes = encode_with_bytes(tokenizer, text)
    assert sizes.sum() == len(text.encode())
    assert (sizes >= 0).all()
    # A byte-level token's own bytes are known: up to shared characters, the prefixes agree.
    done = 0
    for i, token in enumerate(tokenizer.convert_ids_to_tokens(ids.tolist())):
        done += len(token)
        assert abs(int(sizes[: i + 1].sum()) - done) <= 3


def test_bytes_of_a_tokenizer_that_drops_spaces() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ids, sizes = encode_with_bytes(PreTrainedTokenizerFast(tokenizer_object=words), "one  two é ")
    assert ids.tolist() == [0, 1, 2]
    assert sizes.tolist() == [3, 5, 4]
