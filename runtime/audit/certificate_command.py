"""What the command `certificate` of `python -m runtime.audit` does with its options."""

import typer
from pydantic import ValidationError

from runtime.audit.certificate import Certificate
from runtime.audit.certify import certify, compare
from runtime.audit.options import CertificateOptions
from runtime.errors import UserError
from runtime.files import read_json
from runtime.speculative.draft import parts

REPORT = "report.json"


def repeat_certificate(options: CertificateOptions) -> None:
    """Decodes what the certificate says again; exit code 1 where something differs. Raises UserError without one."""
    from runtime.bench.output import write
    from runtime.model.load import load

    folder = options.run if (options.run / REPORT).is_file() else options.run.parent
    expected = _read(options)
    model = folder / "model"
    planes = "nested" in expected.drafters
    target = load(model, threads=options.threads, kernels=options.kernels, planes=planes)
    needs_draft = any({"model", "tree"} & set(parts(name)) for name in expected.drafters)
    draft = None
    if needs_draft:
        if target.draft_path is None:
            raise UserError(f"{folder.name}: the certificate's drafters need draft/, which is missing: restore it")
        draft = load(target.draft_path, threads=options.threads, kernels=options.kernels)
    found = certify(target, draft, expected.prompts, expected.drafters, expected.new_tokens, expected.draft_length)
    wrong = compare(expected, found)
    tokens = sum(text.tokens for text in found.texts)
    here = f"{found.machine.kernels} on {found.machine.architecture}"
    there = f"{expected.machine.kernels} on {expected.machine.architecture}"
    if wrong:
        verdict = f"differs: {'; '.join(wrong)} ({there} then, {here} now)"
    else:
        logits = f"{len(found.logits)} digests of logits" if expected.logits and found.logits else "no digest of logits"
        verdict = f"equal: {tokens} tokens of {len(found.texts)} texts and {logits} ({there} then, {here} now)"
        if not found.logits or not expected.logits:
            verdict += f"; logits are not compared: {found.logits_why or expected.logits_why}"
    typer.echo(verdict)
    if options.json is not None:
        write(options.json, {"equal": not wrong, "differing": wrong, "certificate": found.model_dump(mode="json")})
    if wrong:
        raise typer.Exit(1)


def _read(options: CertificateOptions) -> Certificate:
    folder = options.run if (options.run / REPORT).is_file() else options.run.parent
    if not (folder / REPORT).is_file():
        raise UserError(f"{options.run} has no {REPORT}: name a finished run folder")
    said = read_json(folder / REPORT).get("certificate")
    if said is None:
        raise UserError(
            f"{folder.name}/{REPORT} holds no certificate: the run was made by an older version, without speed, or on a"
            " model that was not loaded; run it again"
        )
    try:
        found = Certificate.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{folder.name}/{REPORT}: certificate.{where}: {first['msg']}: restore the file") from error
    ids = [token for prompt in found.prompts for token in prompt]
    if not found.prompts or not all(found.prompts) or min(ids) < 0 or found.new_tokens < 1:
        raise UserError(f"{folder.name}/{REPORT}: certificate.prompts must be lists of token ids: restore the file")
    return found
