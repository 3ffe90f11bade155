"""What the stages of a recipe that train will take of memory, disk and time: each trains something else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compress.distill.draft_init import count_of
from compress.model.plan import Plan
from compress.model.source import Source
from compress.model.structure import ModelStructure
from compress.pipeline.forecast import Forecast, compute_seconds, resident, stored_bytes
from compress.recipe import Recipe
from compress.recipe.block_draft import BlockDraft
from compress.recipe.training import TrainingStage
from compress.recipe.training_stages import DistillationStage, Draft, Learn, Medusa, Ternary
from compress.training.data import AT_ONCE
from runtime.formats.schemes import SCHEMES

_FLOAT, _HALF, _TOKEN = 4, 2, 4
# Of what is trained, in memory: the weights, their gradient and two moments; on disk: two checkpoints of weights and
# moments, the best weights twice.
_TRAINED_COPIES, _CHECKPOINT_COPIES = 4, 8
# Of the inputs of a model's matrices: norms and what is elementwise keep theirs as well.
_ACTIVATION_COPIES = 2
# Of the logits of a batch: the teacher's, the student's and their gradient, and what the divergence keeps.
_LOGITS_COPIES = 6
# Of the logits of a batch by one Medusa head: as they are in bfloat16 and float32, their gradient, and what cross
# entropy keeps.
_HEAD_COPIES = 4
# Places whose logits a block drafter's training holds at a time.
_JUDGED = 256
# Of the weights of a model that is learned: the original's, and what a layer keeps of its own until its gradient is
# known: codes as floats, scaled, and as its product takes them.
_LEARNED_COPIES = 4
# Forward passes that a token costs what is trained: its forward, and its backward twice.
_PASSES = 3
# Medusa's windows beside those that are trained on: they choose the tree and give the figures.
_OTHER_WINDOWS = 128


@dataclass(frozen=True)
class Size:
    """Of a model: how many weights it has, and how many inputs all of its matrices have together."""

    weights: int
    inputs: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Size":
        """Of the shapes of all tensors."""
        inputs = sum(shape[-1] * math.prod(shape[:-2]) for shape in shapes.values() if len(shape) > 1)
        return cls(sum(map(math.prod, shapes.values())), inputs)

    def __add__(self, other: "Size") -> "Size":
        return Size(self.weights + other.weights, self.inputs + other.inputs)

    def times(self, number: int) -> "Size":
        return Size(self.weights * number, self.inputs * number)


@dataclass(frozen=True)
class Sizes:
    """Of the run's models.

    draft          None where the run has none.
    around, block  what of the target is outside its blocks, and the largest of its `blocks` blocks.
    stored         bytes of the target as it is, and `packed`, as it will be.
    integers       of the target's weights that will be integers, whose codes the stage learn may move.
    rows, width    of the matrix with the most rows, as a rule the embedding: (vocabulary, hidden).
    """

    target: Size
    draft: Size | None
    around: Size
    block: Size
    blocks: int
    stored: int
    packed: int
    integers: int
    rows: int
    width: int

    @classmethod
    def of(cls, target: Source, plan: Plan, structure: ModelStructure, draft: Source | None) -> "Sizes":
        """Of the checkpoints' tensors, and what the plan makes of the target's."""
        shapes, itemsize = target.shapes(), target.item_sizes()
        within: dict[int | None, dict[str, tuple[int, ...]]] = {None: {}}
        for name, shape in shapes.items():
            within.setdefault(structure.block(name), {})[name] = shape
        around, *blocks = (Size.of(found) for found in within.values())
        rows, width = max((shape for shape in shapes.values() if len(shape) == 2), default=(0, 0))
        return cls(
            target=Size.of(shapes),
            draft=None if draft is None else Size.of(draft.shapes()),
            around=around,
            block=max(blocks, key=lambda block: block.weights, default=Size(0, 0)),
            blocks=len(blocks),
            stored=sum(math.prod(shape) * itemsize[name] for name, shape in shapes.items()),
            packed=sum(stored_bytes(name, shape, itemsize[name], plan) for name, shape in shapes.items()),
            integers=sum(math.prod(shapes[name]) for name in plan.layers if not _has_tiles(plan.layers[name].scheme)),
            rows=rows,
            width=width,
        )

    def made(self, keep: float) -> Size:
        """Of a draft that is made of this share of the target's blocks."""
        return self.around + self.block.times(count_of(keep, self.blocks))


def _has_tiles(scheme: str) -> bool:
    return SCHEMES[scheme].codes.has_tiles


@dataclass(frozen=True)
class Share:
    """What one stage takes.

    memory       bytes at the most.
    work, out    bytes that its folder grows to while it works, and what stays of them.
    flops        floating-point operations of a token that is trained on.
    """

    memory: float
    work: float
    out: float
    flops: float


def with_training(need: Forecast, recipe: Recipe, sizes: Sizes) -> Forecast:
    """The forecast with the recipe's stages that train.

    A budget in minutes says itself how long it takes; one in tokens takes as many floating-point operations as the
    passes through what is trained and its teacher.
    """
    stages = {stage.kind: stage.trained for stage in recipe.stages if stage.trained is not None}
    if not stages:
        return need
    shares = {kind: _share(stage, sizes) for kind, stage in stages.items()}
    minutes = sum(stage.training.minutes or 0 for stage in stages.values())
    flops = sum(shares[kind].flops * (stage.training.tokens or 0) for kind, stage in stages.items())
    largest = max(shares, key=lambda kind: shares[kind].memory)
    memory = int(shares[largest].memory) + resident()
    # A stage's checkpoints are removed when it is done.
    disk = int(max(share.work for share in shares.values()) + sum(share.out for share in shares.values()))
    seconds = 60 * minutes + compute_seconds(flops)
    need = replace(need, disk=need.disk + disk, training=seconds)
    return need if need.memory >= memory else replace(need, memory=memory, largest=largest)


def _share(stage: TrainingStage, sizes: Sizes) -> Share:
    if isinstance(stage, Draft):
        return _of_draft(stage, sizes)
    if isinstance(stage, Medusa):
        return _of_medusa(stage, sizes)
    if isinstance(stage, BlockDraft):
        return _of_blocks(stage, sizes)
    if isinstance(stage, Learn):
        return _of_learned(stage, sizes)
    return _of_model(stage, sizes)


def _of_model(stage: TrainingStage, sizes: Sizes) -> Share:
    """The whole model is trained, with the original or its answers as the teacher."""
    answers = stage.answers if isinstance(stage, DistillationStage) else None
    # The teacher is there with the student also where its answers are kept.
    memory = (_TRAINED_COPIES + 1) * sizes.target.weights * _FLOAT + _batch(stage, sizes.target, sizes)
    if isinstance(stage, Ternary):
        # Before there are gradients and moments all windows go through the student together, the original beside it.
        places = stage.fit_windows * stage.training.length
        fitting = 2 * sizes.target.weights + _ACTIVATION_COPIES * places * sizes.block.inputs
        memory = max(memory, fitting * _FLOAT)
    work = sizes.target.weights * _FLOAT * _CHECKPOINT_COPIES
    if answers is not None:
        work += answers.windows * stage.training.length * (answers.top * (_TOKEN + _FLOAT) + _FLOAT)
    return Share(memory, work, sizes.stored, (_PASSES + (answers is None)) * 2.0 * sizes.target.weights)


def _of_learned(stage: Learn, sizes: Sizes) -> Share:
    """Places of codes are trained, where they may move, beside the original; scales and norms are few."""
    weights = sizes.target.weights
    trained = sizes.integers if stage.rounding else 0
    memory = (_TRAINED_COPIES * trained + _LEARNED_COPIES * weights) * _FLOAT + _batch(stage, sizes.target, sizes)
    work = trained * _FLOAT * _CHECKPOINT_COPIES + sizes.packed
    return Share(memory, work, sizes.packed, (_PASSES + 1) * 2.0 * weights)


def _of_draft(stage: Draft, sizes: Sizes) -> Share:
    """The draft is trained beside the packed target."""
    draft, choosing, making = sizes.draft, 0, 0
    if draft is None:
        # The original is read whole, to choose the blocks that the draft is made of, which are written twice.
        draft, choosing = sizes.made(stage.keep), sizes.target.weights * _FLOAT
        making = 2 * draft.weights * _FLOAT
    memory = _TRAINED_COPIES * draft.weights * _FLOAT + sizes.packed + _batch(stage, draft, sizes)
    work = draft.weights * _FLOAT * _CHECKPOINT_COPIES + making
    if stage.teacher:
        work += stage.samples * (stage.training.length + 1) * _TOKEN
    flops = _PASSES * 2.0 * draft.weights + 2.0 * sizes.target.weights
    return Share(max(memory, choosing), work, draft.weights * _FLOAT, flops)


def _of_medusa(stage: Medusa, sizes: Sizes) -> Share:
    """Heads are trained on the packed target's hidden states; with medusa-2 the original is, too, beside them."""
    square, table = sizes.width * sizes.width, sizes.rows * sizes.width
    heads = stage.heads * (stage.layers * square + (square if stage.projection == "shared" else table))
    tokens = max(stage.training.batch * stage.training.length, AT_ONCE // stage.heads)
    memory = (_TRAINED_COPIES * heads + table) * _FLOAT + sizes.packed
    memory += stage.heads * tokens * sizes.rows * _FLOAT * _HEAD_COPIES
    work = heads * _FLOAT * _CHECKPOINT_COPIES
    work += (stage.samples + _OTHER_WINDOWS) * stage.training.length * (sizes.width * _HALF + _TOKEN)
    flops = _PASSES * 2.0 * stage.heads * (stage.layers * square + square * (stage.projection == "shared") + table)
    out = heads * _HALF
    if stage.kind == "medusa-2":
        memory += (_TRAINED_COPIES + 1) * sizes.target.weights * _FLOAT + _batch(stage, sizes.target, sizes)
        # Checkpoints of both, and the model as it was trained; it is packed again, tensor by tensor and joined.
        work += sizes.target.weights * _FLOAT * _CHECKPOINT_COPIES + sizes.stored + sizes.packed
        out += sizes.packed
        flops += (_PASSES + 1) * 2.0 * sizes.target.weights
    return Share(memory, work, out, flops)


def _of_blocks(stage: BlockDraft, sizes: Sizes) -> Share:
    """A network of layers about as large as the packed target's is trained on its states at some depths."""
    taps, table = 3 if stage.taps is None else len(stage.taps), sizes.rows * sizes.width
    around = sizes.width * ((taps + 2) * sizes.width + 5 * stage.rank)
    network = stage.layers * sizes.block.weights + around
    places = stage.training.batch * stage.anchors * stage.draft_length
    memory = (_TRAINED_COPIES * network + 3 * table) * _FLOAT + sizes.packed
    memory += places * _FLOAT * _ACTIVATION_COPIES * stage.layers * sizes.block.inputs
    memory += min(places, _JUDGED) * _FLOAT * _LOGITS_COPIES * sizes.rows
    work = network * _FLOAT * _CHECKPOINT_COPIES
    work += (stage.samples + _OTHER_WINDOWS) * stage.training.length * (taps * sizes.width * _HALF + _TOKEN)
    # Every token of a window is read, and so many places are drafted, each through the head, and so is the target's.
    share = places / (stage.training.batch * stage.training.length)
    flops = _PASSES * 2.0 * (share * (network + table) + around) + 2.0 * share * table
    return Share(memory, work, network * _HALF, flops)


def _batch(stage: TrainingStage, student: Size, sizes: Sizes) -> int:
    """Bytes of what a batch leaves until its gradient is known: inputs of matrices, and logits. An evaluation, which
    keeps no inputs but its block's, may leave more."""
    of_block = _ACTIVATION_COPIES * (sizes.around.inputs + sizes.block.inputs)
    inputs = _ACTIVATION_COPIES * student.inputs
    if getattr(stage, "gradient_checkpointing", False):
        # What goes into each block is kept, and all else of one block at a time.
        inputs = of_block + sizes.blocks * sizes.width
    logits = _LOGITS_COPIES * sizes.rows
    trained = stage.training.batch * stage.training.length * (inputs + logits)
    return _FLOAT * max(trained, max(AT_ONCE, stage.training.length) * (of_block + logits))
