"""Tokenizer and chat template beside the original's: by what they say, and by what they make of a text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.check.findings import Finding, Kind, Level
from compress.check.opening import Opened
from runtime.errors import UserError
from runtime.files import read_json

# What a tokenizer is likely to do otherwise once a part of it is changed.
_TEXT = (
    "The 1,234 quick brown foxes don't jump; naïve café, Straße, 東京 🦊\n\tdef f(x):\n        return x ** 2  # ok\n"
    "    if  x!=3.14e-5: print('\u00a0Привет')\r\n"
)
_PARTS = ("normalizer", "pre_tokenizer", "post_processor")


def _finding(level: Level, kind: Kind, where: str, says: str) -> Finding:
    return Finding(level=level, kind=kind, where=where, says=says)


def check_texts(opened: Opened, original: Opened | None) -> list[Finding]:
    """The tokenizer against config.json, and both against the original's."""
    if opened.header is not None:
        return _check_gguf(opened, original)
    findings: list[Finding] = []
    ours = _tokenizer(opened.path, findings)
    if ours is None and original is not None and not findings and (original.path / "tokenizer.json").is_file():
        findings.append(
            _finding("note", "tokenizer", "tokenizer.json", "is not there: the original's has to be copied")
        )
    words = opened.text_config.get("vocab_size")
    if ours is not None and isinstance(words, int) and (highest := max(_vocabulary(ours).values(), default=0)) >= words:
        says = f"has the token {highest}, and config.json's vocab_size is {words}"
        findings.append(_finding("broken", "tokenizer", "tokenizer.json", says))
    if original is None or not original.path.is_dir():
        return findings
    theirs = _tokenizer(original.path, [])
    if ours is not None and theirs is not None:
        findings += _compare(opened.path, original.path, ours, theirs)
    return [*findings, *_templates(opened.path, original.path, ours is not None)]


def _tokenizer(folder: Path, findings: list[Finding]) -> dict[str, Any] | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        found = read_json(file)
    except UserError as error:
        findings.append(_finding("broken", "tokenizer", file.name, str(error)))
        return None
    return found


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    held = (tokenizer.get("model") or {}).get("vocab") or {}
    words = dict(held) if isinstance(held, dict) else {str(pair[0]): i for i, pair in enumerate(held)}
    added = tokenizer.get("added_tokens") or []
    return words | {token["content"]: token["id"] for token in added if isinstance(token, dict)}


def _compare(ours_at: Path, theirs_at: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> list[Finding]:
    where = "tokenizer.json"
    if ours == theirs:
        return []
    one, other = _vocabulary(ours), _vocabulary(theirs)
    moved = [token for token in other if token in one and one[token] != other[token]]
    gone = [token for token in other if token not in one]
    if moved:
        token = moved[0]
        says = (
            f"{len(moved)} tokens have other numbers than in the original ({token!r}: {one[token]}, not {other[token]})"
        )
        return [_finding("broken", "tokenizer", where, says)]
    if gone:
        says = f"{len(gone)} of the original's tokens are missing ({gone[0]!r} is one)"
        return [_finding("broken", "tokenizer", where, says)]
    if _merges(ours) != _merges(theirs):
        return [_finding("broken", "tokenizer", where, "its merges are not the original's")]
    from tokenizers import Tokenizer

    try:
        ids = [Tokenizer.from_file(str(folder / where)).encode(_TEXT).ids for folder in (ours_at, theirs_at)]
    except Exception as error:  # the library raises nothing else
        return [_finding("broken", "tokenizer", where, f"cannot be read ({' '.join(str(error).split())[:120]})")]
    if ids[0] != ids[1]:
        parts = [part for part in _PARTS if ours.get(part) != theirs.get(part)]
        place = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
        says = f"makes other tokens of a text than the original's, from token {place} on"
        says += f" ({', '.join(parts)} differ)" if parts else ""
        return [_finding("broken", "tokenizer", where, says)]
    if len(one) != len(other):
        return [_finding("note", "tokenizer", where, f"has {len(one) - len(other)} tokens more than the original's")]
    return []


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    merges = (tokenizer.get("model") or {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _template(folder: Path) -> str | None:
    """A directory's chat template; of several the default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace").strip()
    for name in ("tokenizer_config.json", "chat_template.json"):
        try:
            found = read_json(folder / name).get("chat_template") if (folder / name).is_file() else None
        except UserError:
            found = None
        if isinstance(found, list):
            found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
        if isinstance(found, str):
            return found.strip()
    return None


def _templates(ours: Path, theirs: Path, has_tokenizer: bool) -> list[Finding]:
    one, other = _template(ours), _template(theirs)
    where = "chat_template"
    if one == other:
        return []
    if other is None:
        return [_finding("note", "template", where, "is there, and the original has none")]
    if one is None:
        level: Level = "suspicious" if has_tokenizer else "note"
        return [
            _finding(level, "template", where, "is not there, and the original has one: chats are written otherwise")
        ]
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    says = f"is not the original's (from character {place}: {json.dumps(one[place : place + 30])})"
    return [_finding("suspicious", "template", where, says)]


def _check_gguf(opened: Opened, original: Opened | None) -> list[Finding]:
    assert opened.header is not None
    metadata = opened.header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return [_finding("suspicious", "tokenizer", opened.shown, "has no tokenizer")]
    findings = []
    words = opened.config.get("vocab_size")
    if isinstance(words, int) and len(tokens) != words:
        findings.append(_finding("broken", "tokenizer", opened.shown, f"has {len(tokens)} tokens for {words} rows"))
    if original is None or not original.path.is_dir():
        return findings
    theirs = _tokenizer(original.path, [])
    if theirs is not None:
        vocabulary = _vocabulary(theirs)
        off = [t for t, i in vocabulary.items() if i < len(tokens) and tokens[i] != t and t in set(tokens)]
        if off:
            says = f"{len(off)} tokens have other numbers than in the original ({off[0]!r} is one)"
            findings.append(_finding("broken", "tokenizer", opened.shown, says))
    ours, template = metadata.get("tokenizer.chat_template"), _template(original.path)
    if template is not None and (not isinstance(ours, str) or ours.strip() != template):
        what = "has no chat template, and the original has one" if ours is None else "has another chat template"
        findings.append(_finding("suspicious", "template", opened.shown, what))
    return findings
