"""SERVE.md from the sections of all engines."""

from collections.abc import Sequence

from compress.export import told
from compress.export.serve import target
from compress.export.serve.parts import Command, Section, documented
from compress.export.serve.run_facts import Facts


def markdown(facts: Facts, sections: Sequence[Section]) -> str:
    """The page: what all engines have in common, then each of them."""
    drafting = "the model in draft/" if target.drafts(facts) else "n-grams of the text itself (prompt lookup)"
    paragraphs = told(
        f"# Serving {facts.name}",
        f"The model is {target.contents(facts)}, of type {facts.model_type}. What drafts: {drafting}; γ ="
        f" {facts.length} token{'' if facts.length == 1 else 's'} a round. {facts.why}",
        not facts.pays
        and "So take the plain commands; the speculative ones are here for other machines, where it may pay.",
        "Every command is for this folder, and listens on this machine only: put an address of your network in where"
        " others are to reach it, behind something that asks who they are. Sizes of 2 stand for the number of GPUs that"
        " you have. `python -m compress.export . --check` compares every key with the engines that are installed, and"
        " with the documented ones where they are not. Exports write this page and serve/ anew: copy what you change.",
        *(paragraph for section in sections for paragraph in _section(section)),
    )
    return "\n\n".join(paragraphs) + "\n"


def _section(section: Section) -> tuple[str, ...]:
    return told(
        f"## {section.title}",
        f"Keys as of {section.title} {documented(section.engine).version}.",
        "\n".join(f"- {line}" for line in section.lines),
        section.needs and f"First:\n\n{_shell(section.needs)}",
        section.commands and _shell(section.commands),
        "\n".join(f"- `{file.path}`: {file.about}" for file in section.files),
        section.code and f"```python\n{section.code}```",
    )


def _shell(commands: Sequence[Command]) -> str:
    body = "\n".join(f"# {command.about}\n{command.line}" for command in commands)
    return f"```sh\n{body}\n```"
