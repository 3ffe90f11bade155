"""SERVE.md from the sections of all engines."""

from collections.abc import Sequence

from compress.export.serve import target
from compress.export.serve.parts import Command, Section, documented
from compress.export.serve.run_facts import Facts


def markdown(facts: Facts, sections: Sequence[Section]) -> str:
    """The page: what all engines have in common, then each of them."""
    parts = [_head(facts)]
    parts += [_section(section) for section in sections]
    return "\n\n".join(parts) + "\n"


def _head(facts: Facts) -> str:
    drafting = "the model in draft/" if target.drafts(facts) else "n-grams of the text itself (prompt lookup)"
    lines = [
        f"# Serving {facts.name}",
        f"The model is {target.contents(facts)}, of type {facts.model_type}. What drafts: {drafting}; γ ="
        f" {facts.length} tokens a round. {facts.why}",
    ]
    if not facts.pays:
        lines.append("So take the plain commands; the speculative ones are here for other machines, where it may pay.")
    lines.append(
        "Every command is for this folder, and listens on this machine only: put an address of your network in where"
        " others are to reach it, behind something that asks who they are. Sizes of 2 stand for the number of GPUs that"
        " you have. `python -m compress.export . --check` compares every key with the engines that are installed, and"
        " with the documented ones where they are not. Exports write this page and serve/ anew: copy what you change."
    )
    return "\n\n".join(lines)


def _section(section: Section) -> str:
    keys = documented(section.engine)
    blocks = [f"## {section.title}", f"Keys as of {section.title} {keys.version}."]
    if section.lines:
        blocks.append("\n".join(f"- {line}" for line in section.lines))
    if section.needs:
        blocks += ["First:", _shell(section.needs)]
    if section.commands:
        blocks.append(_shell(section.commands))
    if section.files:
        blocks.append("\n".join(f"- `{file.path}`: {file.about}" for file in section.files))
    if section.code:
        blocks.append(f"```python\n{section.code}```")
    return "\n\n".join(blocks)


def _shell(commands: Sequence[Command]) -> str:
    body = "\n".join(f"# {command.about}\n{command.line}" for command in commands)
    return f"```sh\n{body}\n```"
