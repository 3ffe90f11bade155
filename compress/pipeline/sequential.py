"""The sequential pipeline: block after block, each calibrated on what the changed blocks before it give.

1. A plan's parts are taken in order: tensors outside the blocks, each rounded or copied by itself, and blocks.
2. Once, the calibration text goes through the embeddings; what goes into the first block is kept in a file (`Capture`).
3. Where the recipe drops whole blocks, each block's influence is measured first (`measure_influence`).
4. A block is read, and its inputs go through it as it was, for the statistics that all its stages want (`collect`).
5. The stages change the block, one after the other; what it holds now is written.
6. Its inputs go through it once more as it is now: that goes into the next block, and is written too.
   Several processes that torchrun has started share 4 and 6 (calibration/shared.py); the first does the rest.
7. Both are committed to the journal together, so that a killed run goes on here, and the memory is given back.
"""

import math
import statistics as mathematics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor

from calib.moments import Wants
from compress.artifact import files, safetensors
from compress.artifact.journal import Journal
from compress.calibration import activations
from compress.calibration.activations import Activations, Inputs
from compress.calibration.capture import Capture
from compress.calibration.carried import Call, Row
from compress.calibration.shared import SharedInputs, collect_shared
from compress.calibration.statistics import collect, union
from compress.errors import UserError
from compress.model.block import Block, Statistics
from compress.model.block_loader import BlockLoader
from compress.model.plan import Plan
from compress.pipeline.allocator import keep_freed, release
from compress.pipeline.block_line import line
from compress.progress import Note, Progress
from compress.prune.depth import check_config, choose, influence
from compress.recipe.block_stages import Experts
from compress.records import ExpertRecord, LayerRecord
from compress.stages import rounding
from compress.stages.contract import BlockStage
from compress.stages.depth import Shortening
from compress.training.parallel import current
from runtime.checkpoints.directory import Checkpoint


@dataclass(frozen=True)
class BlockPlan:
    """What is done to blocks.

    stages  in order; of which each block's `wants` ask for statistics of `tokens` (S, T) int64.
    few     what becomes of experts that too few tokens reach.
    mapped  whether activations stay in their file instead of in memory.
    wants   by block, what the stages want together; a block that wants nothing is missing.
    meta_blocks  all blocks without weights.
    twins   whether the original's activations go along, for stages that want a drift.
    depth   share of the blocks' weights that goes with whole blocks, before any stage; None: all blocks stay.
    """

    loader: BlockLoader
    stages: Sequence[BlockStage]
    tokens: Tensor
    few: Experts = field(default_factory=Experts)
    mapped: bool = False
    wants: Mapping[int, Mapping[str, Wants]] = field(default_factory=dict)
    meta_blocks: Mapping[int, Block] = field(default_factory=dict)
    depth: float | None = None
    twins: bool = False

    def number(self, names: Sequence[str]) -> int | None:
        """The number of the block that a part's tensors belong to; None for a tensor outside of the blocks."""
        return self.loader.structure.block(names[0])

    @property
    def reads_text(self) -> bool:
        """Whether anything is sent through the blocks."""
        return bool(self.wants) or self.depth is not None


@dataclass(frozen=True)
class BlockResults:
    """What came of it: a record of every packed layer and every expert, and what config.json has to say otherwise.

    plan     what was done in the end: of the blocks that are still there, by their new numbers.
    linears  linear layers of those blocks that are tensors of their own, as the artifact calls them.
    """

    plan: Plan
    layers: tuple[LayerRecord, ...]
    experts: tuple[ExpertRecord, ...]
    config: Mapping[str, Any]
    linears: tuple[str, ...] = ()


def plan_blocks(
    loader: BlockLoader,
    plan: Plan,
    stages: Sequence[BlockStage],
    tokens: Tensor,
    few: Experts | None = None,
    depth: float | None = None,
) -> BlockPlan:
    """The plan of some stages for the blocks of a model: asks each stage what it wants to know of each block.

    Raises UserError for experts that cannot be taken apart.
    """
    wants: dict[int, Mapping[str, Wants]] = {}
    meta_blocks: dict[int, Block] = {}
    for _, names in plan.parts:
        number = loader.structure.block(names[0])
        if number is not None:
            block = loader.meta_block(number, names)
            asked = [found for stage in stages if (found := stage.wants(block))]
            meta_blocks[number] = block
            if asked:
                wants[number] = union(asked)
    twins = any(want.drift for asked in wants.values() for want in asked.values())
    few = few or Experts()
    return BlockPlan(loader, stages, tokens, few, wants=wants, meta_blocks=meta_blocks, depth=depth, twins=twins)


def run(
    checkpoint: Checkpoint, plan: Plan, blocks: BlockPlan | None, journal: Journal, progress: Progress, note: Note
) -> BlockResults:
    """Writes every part that the journal does not have yet. `blocks` None: rounding to nearest, tensor by tensor.

    note  is given a line after every block.
    Raises UserError for weights or activations that are not finite, naming them.
    """
    keep_freed()
    pipeline = None if blocks is None else _BlockPipeline(plan, blocks, journal, note)
    short = Shortening(frozenset(), "") if pipeline is None else pipeline.drop_blocks(progress)
    count = len(plan.parts)
    for index, (part, names) in enumerate(plan.parts):
        progress("quantize", index, count)
        number = None if blocks is None else blocks.number(names)
        if part in journal.parts or number in short.dropped:
            continue
        file = f"part-{index:05d}.safetensors"
        if pipeline is not None and number is not None:
            pipeline.run_block(part, number, names, file, short)
            continue
        tensors, records = rounding.part(checkpoint, plan, names)
        written = safetensors.write_part(journal.folder / file, tensors)
        del tensors
        journal.commit(part, _record(file, written, records))
        release()
    progress("quantize", count, count)
    return _results(short.plan(plan), journal, short.config(checkpoint.config))


class _BlockPipeline:
    """Takes blocks in order; holds what goes into the next one."""

    def __init__(self, plan: Plan, blocks: BlockPlan, journal: Journal, note: Note):
        self.plan, self.blocks, self.journal, self.note = plan, blocks, journal, note
        self.loader = blocks.loader
        self.count = len(blocks.meta_blocks)
        self.kept = sorted(blocks.meta_blocks)
        # After the last block that wants statistics nothing needs its outputs.
        self.last = max(blocks.wants, default=-1)
        self.world = current()
        if self.world.size > 1 and blocks.twins:
            raise UserError("torchrun: a recipe that follows the original beside (drift) is calibrated by one process")
        self.calls: list[Call] = []
        self.activations: Activations | None = None

    def drop_blocks(self, progress: Progress) -> Shortening:
        """Chooses the blocks that go, where the recipe takes some: each block's influence, block after block."""
        blocks_at = self.loader.structure.blocks_at
        if self.blocks.depth is None:
            return Shortening(frozenset(), blocks_at)
        check_config(self.loader.checkpoint.config)
        names = {number: names for _, names in self.plan.parts if (number := self.blocks.number(names)) is not None}
        self.loader.structure.check_renumbering(name for tensors in names.values() for name in tensors)
        if "dropped" not in self.journal.scan:
            for number in range(len(self.journal.scan.get("influences", [])), self.count):
                progress("scan", number, self.count)
                self.measure_influence(number, names[number])
            weights = [self._weights(names[number]) for number in range(self.count)]
            outside = sum(self._weights(ns) for _, ns in self.plan.parts if self.blocks.number(ns) is None)
            found = self.journal.scan["influences"]
            dropped = choose(found, weights, outside, self.blocks.depth)
            self.journal.note(scan={"influences": found, "dropped": list(dropped)}, inputs=None)
            files.remove(self.journal.folder / activations.file_name(self.count - 1))
            self.activations = None
            progress("scan", self.count, self.count)
            self.note(f"blocks {', '.join(str(number + 1) for number in dropped)} of {self.count} go: least influence")
        gone = frozenset(self.journal.scan["dropped"])
        self.kept = [number for number in self.kept if number not in gone]
        self.last = max((number for number in self.blocks.wants if number not in gone), default=-1)
        return Shortening(gone, blocks_at)

    def measure_influence(self, number: int, names: Sequence[str]) -> None:
        """Measures what one block changes, and saves what the next one is given."""
        inputs, block = self._inputs(number), self.loader.load(number, names)
        found: list[float] = []

        def watched() -> Iterator[tuple[Row, Tensor]]:
            for before, (row, after) in zip(inputs.windows(), inputs.following(block), strict=True):
                found.append(influence([(before, row.split(after)[0])]))
                yield row, after

        following = self._save(number + 1, inputs, watched()) if number + 1 < self.count else self.journal.inputs
        if number + 1 == self.count:
            for _ in watched():
                pass
        # Windows are of one length: the mean of their means is the mean over tokens.
        influences = [*self.journal.scan.get("influences", []), mathematics.mean(found)]
        self.journal.note(scan={"influences": influences}, inputs=following)
        if number + 1 < self.count:
            self._forget(number, following)
        release()

    def run_block(self, part: str, number: int, names: Sequence[str], file: str, short: Shortening) -> None:
        """Works on one block, writes it and what goes into the next, and commits both together."""
        begun = time.monotonic()
        inputs = self._inputs(number) if number <= self.last else None
        block = self.loader.load(number, names)
        onward = inputs is not None and number < self.last
        twins = self._following_twins(block, inputs) if inputs is not None and onward and self.blocks.twins else None
        self._stages(block, inputs)
        tensors, records = short.renamed(*self.loader.stored(block, names))
        written = safetensors.write_part(self.journal.folder / file, tensors)
        del tensors
        record = _record(file, written, records) | {
            "experts": [asdict(expert) | {"block": self.kept.index(number)} for expert in block.experts],
            "config": block.config,
            "linears": short.names([name for name in block.names.values() if f"{name}.weight" in names]),
        }
        following = None
        if inputs is not None and onward:
            after = self.kept[self.kept.index(number) + 1]
            following = self._save(after, inputs, chain(inputs.following(block), twins.stored() if twins else ()))
            if twins is not None:
                files.remove(self.journal.folder / activations.file_name(twins.block))
        self.journal.commit(part, record, following)
        if inputs is not None:
            self._forget(number, following)
        self.note(line(number, self.count, records, time.monotonic() - begun))
        del block, inputs
        release()

    def _following_twins(self, block: Block, inputs: Inputs) -> Activations:
        """What goes into the next block in the original: in a file that no journal lists, before stages change this."""
        spare = self.count + 1
        count, tokens, _ = inputs.activations.data.shape
        rows = inputs.following_twins(block)
        saved = activations.save(self.journal.folder, spare, rows, count // 2, tokens)
        return activations.load(self.journal.folder, saved, self.blocks.mapped)

    def _stages(self, block: Block, inputs: Inputs | None) -> None:
        wants = self.blocks.wants.get(block.number, {})
        found: Statistics = (
            collect(block, inputs, wants, self.blocks.few, collect_shared) if wants and inputs is not None else {}
        )
        for stage in self.blocks.stages:
            stage.apply(block, found, inputs)

    def _inputs(self, number: int) -> Inputs:
        """What goes into block `number`: at hand, from the journal's file, or from the text for the first one."""
        if not self.calls or self.journal.inputs is None:
            self._capture()
        if self.activations is None:
            assert self.journal.inputs is not None
            self.activations = activations.load(self.journal.folder, self.journal.inputs, self.blocks.mapped)
        if self.activations.block != number:
            raise ValueError(f"block {number}: expected its inputs, found those of block {self.activations.block}")
        if self.world.size == 1:
            return Inputs(self.activations, self.calls[number], self.blocks.twins)
        return SharedInputs(self.activations, self.calls[number], world=self.world)

    def _capture(self) -> None:
        outside = [name for _, names in self.plan.parts if self.blocks.number(names) is None for name in names]
        capture = Capture(self.loader, outside)
        tokens = self.blocks.tokens
        if self.journal.inputs is None:
            # The first block reads what it reads in the original.
            twice = chain(capture.inputs(tokens), capture.inputs(tokens) if self.blocks.twins else ())
            count = len(tokens) * (2 if self.blocks.twins else 1)
            saved = activations.save(self.journal.folder, self.kept[0], twice, count, tokens.shape[1])
            self.journal.note(inputs=saved)
        else:
            # The inputs are as they were saved; how blocks are called does not depend on the text.
            next(capture.inputs(tokens[:1]))
        self.calls = capture.calls
        capture.release()

    def _weights(self, names: Sequence[str]) -> int:
        return sum(math.prod(self.loader.checkpoint.shape(name)) for name in names)

    def _save(self, number: int, inputs: Inputs, rows: Iterable[tuple[Row, Tensor]]) -> dict[str, Any]:
        count, tokens, _ = inputs.activations.data.shape
        return activations.save(self.journal.folder, number, rows, count, tokens)

    def _forget(self, number: int, following: dict[str, Any] | None) -> None:
        """Lets go of a block's inputs, which no resumed run asks for any more."""
        self.activations = None
        if following is not None:
            files.remove(self.journal.folder / activations.file_name(number))


def _record(file: str, written: files.Written, records: Sequence[LayerRecord]) -> dict[str, Any]:
    return {
        "file": file,
        "bytes": written.bytes,
        "sha256": written.sha256,
        "layers": [asdict(record) for record in records],
    }


def _results(plan: Plan, journal: Journal, config: dict[str, Any]) -> BlockResults:
    parts = [journal.parts[part] for part, _ in plan.parts]
    for part in parts:
        for key, value in part.get("config", {}).items():
            if config.setdefault(key, value) != value:
                raise ValueError(f"config.json: blocks disagree about {key}: {config[key]} and {value}")
    return BlockResults(
        plan,
        tuple(LayerRecord(**record) for part in parts for record in part["layers"]),
        tuple(ExpertRecord(**record) for part in parts for record in part.get("experts", [])),
        config,
        tuple(name for part in parts for name in part.get("linears", [])),
    )
