"""Prompts cut out of a corpus, spread over its documents: beginnings of functions and of paragraphs."""

import ast
import json
import os
import random
import re
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

from calib.corpora import Corpus
from calib.errors import UserError

# Enough to show where a function is going; what is cut off leaves the model something to say.
_MAX_LINES, _MIN_REGION_LINES = 12, 6
_MAX_WORDS, _MIN_PARAGRAPH_WORDS = 48, 16


def prompts(corpus: Corpus, count: int, seed: int) -> list[str]:
    """`count` different prompts: the same for the same corpus and seed, and as many documents as there are.

    A document that is Python gives the first lines of a function or class (at most half of it, at most 12 lines),
    unindented and with the final newline; any other one gives the first half of a paragraph (at most 48 words). A
    corpus of prompts gives them whole.

    Raises UserError where the corpus has fewer.
    """
    if count < 1:
        raise UserError(f"expected at least 1 prompt, found {count}: ask for more")
    chooser = random.Random(seed)
    order = list(range(len(corpus.documents)))
    chooser.shuffle(order)
    queues = []
    for index in order:
        text = corpus.documents[index]
        candidates = [text] if corpus.are_prompts else code_prompts(text)
        if candidates is None:
            candidates = prose_prompts(text)
        chooser.shuffle(candidates)
        queues.append(candidates)
    chosen = _round_robin(queues, count)
    if len(chosen) < count:
        raise UserError(
            f"{corpus.name} gives only {len(chosen)} of {count} prompts: ask for fewer or name a longer text"
        )
    return chosen


def _round_robin(queues: Sequence[list[str]], count: int) -> list[str]:
    """One of each queue in turn, each text once, until there are `count` or none is left."""
    chosen: dict[str, None] = {}
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                chosen.setdefault(queue[turn])
                if len(chosen) == count:
                    return list(chosen)
    return list(chosen)


def code_prompts(text: str) -> list[str] | None:
    """The beginnings of the functions and classes of a Python source; None where `text` is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    # Not splitlines(), which also splits at form feeds and so counts lines otherwise than the parser does.
    lines = re.split(r"\r\n|\r|\n", text)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.end_lineno is None:
            continue
        region = lines[node.lineno - 1 : node.end_lineno]
        if len(region) < _MIN_REGION_LINES or not region[0].lstrip().startswith(("def ", "async def ", "class ")):
            continue
        kept = region[: min(_MAX_LINES, len(region) // 2)]
        while not kept[-1].strip():
            kept.pop()
        prompt = textwrap.dedent("\n".join(kept)) + "\n"
        if not prompt[0].isspace():  # a string's lines stand further left than the function
            found.append(prompt)
    return found


def prose_prompts(text: str) -> list[str]:
    """The first halves of the paragraphs of a text, without the short ones (headings, list items)."""
    paragraphs = [(paragraph, list(re.finditer(r"\S+", paragraph))) for paragraph in re.split(r"\n\s*\n", text)]
    return [
        paragraph[words[0].start() : words[min(_MAX_WORDS, len(words) // 2) - 1].end()]
        for paragraph, words in paragraphs
        if len(words) >= _MIN_PARAGRAPH_WORDS
    ]


def category(prompt: str) -> str:
    """What a prompt begins: "class", "function" or "prose"."""
    start = prompt.lstrip()
    if start.startswith("class "):
        return "class"
    return "function" if start.startswith(("def ", "async def ")) else "prose"


def write_prompts(texts: Sequence[str], out: Path) -> None:
    """Writes one {"prompt": …, "category": …} per line beside `out`, syncs, and renames; categories: `category`.

    Raises UserError where it cannot.
    """
    if out.exists() and not out.is_file():
        raise UserError(f"{out} is a folder or a device, which no file can replace: name a file")
    beside = out.with_name(out.name + ".partial")
    try:
        # Whatever an earlier run left, or somebody put there: opening a pipe would wait.
        beside.unlink(missing_ok=True)
        with beside.open("x", encoding="utf-8") as file:
            lines = ({"prompt": text, "category": category(text)} for text in texts)
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"{out} cannot be written ({error.strerror}): name another file") from error
