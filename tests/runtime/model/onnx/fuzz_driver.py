"""Damages ONNX exports and loads them, in a process of its own: ONNX Runtime could take its process along.

    python fuzz_driver.py COUNT SEED FOLDER…

A FOLDER has model.onnx, model.onnx.data and config.json; the damaged ones are in FOLDER/damaged, COUNT of each. Before
every attempt its folder and number are printed, and at the end one line of JSON: the peak of memory in bytes, and of
each folder the attempts that were refused and the longest one in seconds.
"""

import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from runtime import load
from runtime.contract import Rows, integers
from runtime.errors import UserError

_SIZES = (0, 1, -1, 2, 3, 7, 16, 31, 4096, 2**31 - 1, 2**31, 2**40, 2**62, -(2**63))
_WORDS = ("", "x", "logits", "../model.onnx", "/etc/hostname", "MatMul", "Reshape", "Loop", "com.microsoft", "\x00")


@dataclass(frozen=True)
class Files:
    """What an export consists of."""

    graph: bytes
    data: bytes | None
    config: Any


def read(folder: Path) -> Files:
    data = folder / "model.onnx.data"
    config = json.loads((folder / "config.json").read_text())
    return Files((folder / "model.onnx").read_bytes(), data.read_bytes() if data.is_file() else None, config)


def write(files: Files, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(files.graph)
    if files.data is not None:
        (folder / "model.onnx.data").write_bytes(files.data)
    (folder / "config.json").write_text(json.dumps(files.config))


def mutate_tensor(chance: random.Random, tensor: onnx.TensorProto) -> None:
    """Another shape, type, place or value."""
    way = chance.randrange(6)
    if way == 0 and tensor.dims:
        tensor.dims[chance.randrange(len(tensor.dims))] = chance.choice(_SIZES)
    elif way == 1:
        tensor.data_type = chance.randrange(-1, 27)
    elif way == 2:
        tensor.dims[:] = [chance.choice(_SIZES) for _ in range(chance.randrange(5))]
    elif way == 3 and tensor.external_data:
        chance.choice(tensor.external_data).value = chance.choice([*_WORDS, *map(str, _SIZES)])
    elif way == 4:
        tensor.dims.reverse()
    elif tensor.raw_data:
        raw = bytearray(tensor.raw_data)
        raw[chance.randrange(len(raw))] = chance.choice([0, 127, 128, 255, chance.randrange(256)])
        tensor.raw_data = bytes(raw) if chance.random() < 0.7 else bytes(raw[: chance.randrange(len(raw))])


def mutate_node(chance: random.Random, graph: onnx.GraphProto) -> None:
    """Another operator, input, output or attribute; or no node, or two of it."""
    node = chance.choice(graph.node)
    way = chance.randrange(8)
    if way == 0:
        graph.node.remove(node)
    elif way == 1:
        graph.node.append(node)
    elif way == 2:
        node.op_type = chance.choice([*_WORDS, chance.choice(graph.node).op_type])
    elif way == 3:
        node.domain = chance.choice(_WORDS)
    elif way == 4 and node.input:
        other = chance.choice(graph.node)
        node.input[chance.randrange(len(node.input))] = chance.choice([*other.input, *other.output, "", "x"])
    elif way == 5 and node.input:
        del node.input[chance.randrange(len(node.input))]
    elif way == 6:
        node.input.append(chance.choice(graph.initializer).name)
    elif node.attribute:
        attribute = chance.choice(node.attribute)
        if attribute.ints and chance.random() < 0.5:
            attribute.ints[chance.randrange(len(attribute.ints))] = chance.choice(_SIZES)
        elif attribute.HasField("t") and chance.random() < 0.8:
            mutate_tensor(chance, attribute.t)
        else:
            attribute.i = chance.choice(_SIZES)
            if chance.random() < 0.1:
                attribute.type = chance.randrange(15)


def mutate_graph(chance: random.Random, data: bytes) -> bytes:
    """A graph that says something else in one place."""
    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    way = chance.randrange(8)
    if way < 3:
        mutate_tensor(chance, chance.choice(graph.initializer))
    elif way < 6:
        mutate_node(chance, graph)
    elif way == 6:
        value = chance.choice([*graph.input, *graph.output, *graph.value_info])
        kind = value.type.tensor_type
        if kind.shape.dim and chance.random() < 0.6:
            chance.choice(kind.shape.dim).dim_value = chance.choice(_SIZES)
        elif chance.random() < 0.5:
            kind.elem_type = chance.randrange(27)
        else:
            value.name = chance.choice(_WORDS)
    elif chance.random() < 0.5:
        chance.choice(model.opset_import).version = chance.choice(_SIZES)
    else:
        model.ir_version = chance.choice(_SIZES)
    return model.SerializeToString()


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def mutations(chance: random.Random, whole: Files) -> Iterator[Files]:
    """Endless exports with something wrong."""
    while True:
        way = chance.randrange(10)
        if way == 0:
            yield replace(whole, graph=whole.graph[: chance.randrange(len(whole.graph))])
        elif way < 3:
            yield replace(whole, graph=mutate_bytes(chance, whole.graph))
        elif way == 3 and whole.data is not None:
            cut = whole.data[: chance.randrange(len(whole.data))] if chance.random() < 0.8 else None
            yield replace(whole, data=cut)
        elif way == 4:
            key = chance.choice(sorted(whole.config))
            yield replace(whole, config=whole.config | {key: chance.choice([*_SIZES, *_WORDS, None, [], {}])})
        else:
            yield replace(whole, graph=mutate_graph(chance, whole.graph))


def attempt(folder: Path) -> str | None:
    """Why the export was refused; None where it decodes. Anything but a UserError goes through."""
    try:
        decoder = load(folder, threads=1).decoder
        cache = decoder.new_cache()
        request = cache.open(4)
        for start, tokens in ((0, [5, 6, 7]), (3, [8])):
            decoder.forward(integers(tokens), Rows.chains([(request, start, len(tokens))]), cache)
    except UserError as error:
        return str(error)
    return None


def fuzz(folder: Path, count: int, seed: int) -> dict[str, float]:
    """Attempts that were refused, and the longest one in seconds."""
    whole, damaged = read(folder), folder / "damaged"
    write(whole, damaged)
    assert attempt(damaged) is None, attempt(damaged)
    refused, longest = 0, 0.0
    for number, files in zip(range(count), mutations(random.Random(seed), whole), strict=False):
        print(folder.name, number, flush=True)
        write(files, damaged)
        started = time.perf_counter()
        why = attempt(damaged)
        longest = max(longest, time.perf_counter() - started)
        refused += why is not None
        assert why is None or ("\n" not in why and len(why) < 1000), why
    return {"refused": refused, "longest": longest}


def main(count: int, seed: int, folders: list[Path]) -> None:
    found = {folder.name: fuzz(folder, count, seed) for folder in folders}
    # Not getrusage's peak, which begins with what the process that started this one had.
    status = Path("/proc/self/status").read_text().splitlines()
    [peak] = [1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM")]
    print(json.dumps({"peak": peak, "folders": found}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
