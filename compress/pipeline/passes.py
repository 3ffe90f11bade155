"""How model/ comes to be: a walk over the original's blocks, then training, perhaps a second walk over the result.

no training              one walk, whose parts become model/
prune, heal              a walk that prunes, then training, whose result is model/
prune, heal, quantize    the same, then a second walk over what was healed
ternary, qat             training first, unless there is something to prune
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifact import STAGES, safetensors
from compress.artifact import journal as journals
from compress.artifact.files import copy_synced, sync_folder
from compress.artifact.journal import Journal
from compress.errors import UserError
from compress.model import directory
from compress.model.plan import Plan, check_shared, make_plan
from compress.model.source import Source
from compress.model.structure import Skeleton, Survey, survey
from compress.pipeline.sequential import Note, Progress, Walked, Work, make_work, release, walk
from compress.recipe import Recipe
from compress.recipe.block_stages import Experts
from compress.records import ExpertRecord, LayerRecord, LeftAlone
from compress.stages.quantize import is_plain, make_stages
from compress.stages.sensitivity import choose_schemes
from compress.training import contract
from compress.training.contract import KINDS, Given
from compress.training.parallel import World, current
from runtime.checkpoints.open import open_checkpoint
from runtime.devices import resolve

if TYPE_CHECKING:
    from calib.windows import Windows
    from compress.training.data import StageText

_SECOND = "second-walk"


@dataclass(frozen=True)
class Surroundings:
    """What all stages of a run share. `texts`: what stages train on, by their index in the recipe."""

    target: Source
    draft: Source | None
    recipe: Recipe
    windows: "Windows"
    texts: Mapping[int, "StageText"]
    device: str
    threads: int | None
    seed: int
    shard_bytes: int
    progress: Progress
    note: Note


@dataclass(frozen=True)
class Pass:
    """A walk that is planned: over which model, by which stages."""

    source: Source
    recipe: Recipe
    plan: Plan
    work: Work | None


@dataclass
class Made:
    """What is known of model/ once it is there. `told` is what each stage that trained says, by its kind."""

    layers: tuple[LayerRecord, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    experts: tuple[ExpertRecord, ...] = ()
    pruned: tuple[str, ...] = ()
    told: dict[str, dict[str, Any]] = field(default_factory=dict)


def first_stages(recipe: Recipe) -> Recipe | None:
    """The stages of the first walk; None where training comes before anything else."""
    if not weights_trained(recipe):
        return recipe.only("prune", "smooth", "quantize")
    first = recipe.only("prune")
    return first if first.stages else None


def weights_trained(recipe: Recipe) -> list[int]:
    """Indices of the stages that train the model's own weights before it is packed."""
    return [i for i, stage in enumerate(recipe.stages) if stage.trained is not None and not _after(stage.kind)]


def plan_pass(source: Source, recipe: Recipe, structure: Survey, windows: "Windows", progress: Progress) -> Pass:
    """Plans a walk. Raises UserError for what no stage can do with this model."""
    plan = make_plan(source.shapes(), structure, recipe.quantize, changed=bool(recipe.prunes))
    if recipe.quantize is not None and recipe.quantize.method == "sensitivity":
        plan = choose_schemes(source.path, plan, structure, recipe.quantize, windows.calibration, progress)
    return Pass(source, recipe, plan, _work(source, recipe, plan, structure, windows))


def read_texts(around: Surroundings, folder: Path) -> None:
    """Tokenises what stages train on, before any work: a text that is too short is told at once."""
    for text in around.texts.values():
        text.tokens(folder / STAGES, around.progress)


def make_model(planned: Pass | None, around: Surroundings, journal: Journal, mapped: bool) -> Made:
    """Makes `journal.folder`/model.

    planned  the first walk; None where training comes before anything else. mapped: activations stay in their file.
    """
    model = journal.folder / "model"
    # What a run that was killed in here has left is made again, as a whole.
    _clear(model)
    source, made, walked = around.target, Made(), None
    if planned is not None:
        walked = _walk(planned, around, journal, mapped)
        made = _known(planned.recipe, walked)
    trained = weights_trained(around.recipe)
    if not trained:
        assert planned is not None and walked is not None
        _assemble(planned, walked, journal, model, around)
        return made
    if planned is not None and walked is not None:
        plain = journal.folder / STAGES / "walked"
        if not _is_done(around.recipe, trained[-1], journal):
            _clear(plain)
            _assemble(planned, walked, journal, plain, around)
            release()
        source = Source(around.target.name, open_checkpoint(plain)) if plain.exists() else source
    out = source.path
    for index in trained:
        finished = _train(index, out, around, journal)
        out = finished.out
        _remember(made, around.recipe.stages[index].kind, finished.told)
    second = around.recipe.only("smooth", "quantize")
    if not second.stages:
        copy_folder(out, model)
        return made
    source = Source(around.target.name, open_checkpoint(out))
    planned = plan_pass(source, second, survey(out), around.windows, around.progress)
    inner = _second_journal(journal)
    walked = _walk(planned, around, inner, mapped)
    _assemble(planned, walked, inner, model, around)
    known = _known(second, walked)
    made.layers, made.left_alone = known.layers, known.left_alone
    made.experts += known.experts
    made.pruned = walked.linears if made.pruned else ()
    return made


def check_processes(recipe: Recipe, world: World) -> None:
    """Raises UserError where several processes were started for a recipe that they cannot share."""
    if world.size == 1:
        return
    alone = [stage.kind for stage in recipe.stages if stage.trained is not None and not KINDS[stage.kind].parallel]
    if alone or not recipe.trains:
        what = f"stage {alone[0]} works in one" if alone else f"recipe {recipe.name} has no stage that trains"
        raise UserError(f"torchrun: expected one process, found {world.size}: {what}; start it with python -m")


def follow(around: Surroundings, world: World) -> None:
    """What processes besides the first do: train with it whenever it comes to a stage that trains."""
    call: tuple[int, Path, Path | None, Path] | None
    while (call := world.share(None)) is not None:
        with tempfile.TemporaryDirectory() as folder:
            index, model, draft, texts = call
            given = _given(index, model, draft, texts, Path(folder) / "work", around)
            contract.work(around.recipe.stages[index], given, Path(folder) / "out")


def make_companions(around: Surroundings, journal: Journal, made: Made) -> None:
    """Makes draft/ and medusa/ beside the finished model/: by the stages that train them, or as the draft is."""
    folder = journal.folder
    stages = {stage.kind: index for index, stage in enumerate(around.recipe.stages) if _after(stage.kind)}
    results = {KINDS[kind].result for kind in stages}
    for name in {"draft", *results}:
        _clear(folder / name)
    if around.draft is not None and "draft" not in results:
        directory.copy_model(around.draft.path, folder / "draft", around.draft.weight_files)
    for kind, index in stages.items():
        finished = _train(index, folder / "model", around, journal)
        copy_folder(finished.out, folder / KINDS[kind].result)
        if (again := folder / KINDS[kind].result / "model").is_dir():
            _clear(folder / "model")
            again.rename(folder / "model")
        _remember(made, kind, finished.told)


def copy_folder(source: Path, target: Path) -> None:
    """Copies a folder's files, each of them whole and synced."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            copy_synced(path, place)
    sync_folder(target)


def _train(index: int, model: Path, around: Surroundings, journal: Journal) -> contract.Finished:
    stage, text = around.recipe.stages[index], around.texts[index]
    home = contract.place(journal.folder, index, stage.kind)
    if home.name in journal.stages:
        return contract.finished(home, journal)
    drafting = journal.folder / "draft"
    draft = drafting if drafting.is_dir() else around.draft.path if around.draft is not None else None
    texts = journal.folder / STAGES
    given = _given(index, model, draft, texts, home / "work", around)
    if _after(stage.kind):
        given = replace(given, pack=partial(_pack, around, journal))
    current().share((index, model, draft, texts))
    return contract.run_stage(stage, home, journal, given, text.told())


def _given(index: int, model: Path, draft: Path | None, texts: Path, work: Path, around: Surroundings) -> Given:
    trained = around.recipe.stages[index].trained
    assert trained is not None
    return Given(
        original=around.target.path,
        model=model,
        draft=draft,
        tokens=around.texts[index].tokens(texts, around.progress),
        held_out=around.texts[index].held_out,
        tokenizer=around.target.tokenizer,
        work=work,
        settings=trained.training.settings(around.seed),
        budget=trained.training.budget(),
        seed=around.seed,
        progress=around.progress,
        note=around.note,
        device=str(resolve(around.device)),
        threads=around.threads,
        shard_bytes=around.shard_bytes,
    )


def _pack(around: Surroundings, journal: Journal, plain: Path, out: Path) -> None:
    """Packs a plain directory with the original's architecture by the recipe's stages, as the original was packed."""
    recipe = around.recipe.only("smooth", "quantize")
    if not recipe.stages:
        copy_folder(plain, out)
    else:
        source = Source(around.target.name, open_checkpoint(plain))
        planned = plan_pass(source, recipe, survey(plain), around.windows, around.progress)
        folder = out.with_name(out.name + "-walk")
        _clear(folder)
        folder.mkdir()
        inner = journals.begin(folder, journal.fingerprint)
        _assemble(planned, _walk(planned, around, inner, mapped=False), inner, out, around)
        _clear(folder)
    if around.recipe.kv is not None:
        from compress.stages import kv_cache

        scheme, windows = around.recipe.kv.scheme, around.windows.calibration
        found = kv_cache.calibrate(out, scheme, windows, around.threads, partial(around.progress, "cache"))
        kv_cache.attach(out, found, around.shard_bytes)


def _remember(made: Made, kind: str, told: dict[str, Any]) -> None:
    """Takes what a stage says; the layers that it has packed are the model's."""
    about = dict(told)
    layers, left = about.pop("layers", None), about.pop("left_alone", None)
    if layers is not None:
        made.layers = tuple(LayerRecord(**layer) for layer in layers)
    if left is not None:
        made.left_alone = tuple(LeftAlone(**entry) for entry in left)
    made.told[kind] = about


def _known(recipe: Recipe, walked: Walked) -> Made:
    masked = any(prune.share is None for prune in recipe.prunes)
    return Made(walked.layers, walked.plan.left_alone, walked.experts, walked.linears if masked else ())


def _walk(planned: Pass, around: Surroundings, journal: Journal, mapped: bool) -> Walked:
    work = None if planned.work is None else replace(planned.work, mapped=mapped)
    return walk(planned.source.checkpoint, planned.plan, work, journal, around.progress, around.note)


def _assemble(planned: Pass, walked: Walked, journal: Journal, out: Path, around: Surroundings) -> None:
    """Puts a walk's parts together as a model directory."""
    source, plan = planned.source, walked.plan
    out.mkdir(parents=True)
    safetensors.join([journal.folder / journal.parts[part]["file"] for part, _ in plan.parts], out, around.shard_bytes)
    quantization = directory.quantization_config(plan, source.checkpoint.config)
    directory.write_config(source.path, out, quantization, walked.config)
    directory.copy_companions(source.path, out)


def _second_journal(journal: Journal) -> Journal:
    """The second walk's own journal: its parts go by the same names as the first one's."""
    folder = journal.folder / STAGES / _SECOND
    folder.mkdir(parents=True, exist_ok=True)
    begun = (folder / journals.NAME).exists()
    return journals.resume(folder, journal.fingerprint) if begun else journals.begin(folder, journal.fingerprint)


def _is_done(recipe: Recipe, index: int, journal: Journal) -> bool:
    return contract.place(journal.folder, index, recipe.stages[index].kind).name in journal.stages


def _after(kind: str) -> bool:
    return kind in KINDS and KINDS[kind].after_packing


def _clear(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _work(source: Source, recipe: Recipe, plan: Plan, model: Survey, windows: "Windows") -> Work | None:
    """What the recipe does to blocks; None where it only rounds to nearest, tensor by tensor."""
    if is_plain(recipe):
        return None
    check_shared(model)
    skeleton = Skeleton(source.checkpoint, model)
    stages = make_stages(recipe, plan, skeleton)
    wished = recipe.quantize.experts if recipe.quantize is not None else None
    few = wished or Experts()
    depth = next((stage.share for stage in recipe.prunes if stage.method == "depth"), None)
    return make_work(skeleton, plan, stages, windows.calibration, few, depth)
