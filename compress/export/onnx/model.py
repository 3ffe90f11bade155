"""`onnx` and `onnx-fp16`: a model as an ONNX graph over our codes, for ONNX Runtime and ONNX Runtime GenAI.

    model.onnx            the graph (graph.py: names and axes), its layers as layers.py says
    model.onnx.data       its weights, where they are too many for one file
    genai_config.json     for ONNX Runtime GenAI
    config.json, tokenizer files

The folder is also a model for `runtime.load`, and has Optimum's layout.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from compress.artifact.files import write_json
from compress.errors import USER_ERRORS, UserError
from compress.export import Exported, Loss, Progress, check_kinds, told
from compress.export.onnx import check
from compress.export.onnx import graph as onnx_graph
from compress.export.onnx.graph import Sizes
from compress.export.onnx.weights import Weights, plain
from compress.model.directory import copy_companions
from runtime.checkpoints.directory import Checkpoint
from runtime.checkpoints.open import open_checkpoint
from runtime.formats.packed import PackedWeight
from runtime.formats.tensors import expect_shape

if TYPE_CHECKING:
    import onnx_ir as ir

    from compress.export.onnx.layers import Linear

FILE = "genai_config.json"
# GenAI's name for any decoder of text whose inputs are named below; its others only add chat habits.
_TYPE = "decoder"
_POSITIONS = ("max_position_embeddings", "n_positions")
# Where neither config.json nor the tokenizer ends texts GenAI still wants a number; this one no vocabulary has.
_NO_TOKEN = -1


def genai_config(config: Mapping[str, Any], generation: Mapping[str, Any], sizes: Sizes, file: str) -> dict[str, Any]:
    """The file's content, for greedy decoding unless its user says otherwise.

    config, generation  config.json and generation_config.json (empty where there is none); the second's end tokens win.
    file                of the graph, in the same folder.
    """
    length = next((int(config[key]) for key in _POSITIONS if config.get(key)), 2048)
    end = generation.get("eos_token_id", config.get("eos_token_id"))
    end = _NO_TOKEN if end is None else end
    first_end = end[0] if isinstance(end, list) else end
    start = generation.get("bos_token_id", config.get("bos_token_id"))
    pad = generation.get("pad_token_id", config.get("pad_token_id"))
    heads = config.get("num_attention_heads") or config.get("n_head")
    return {
        "model": {
            "type": _TYPE,
            "bos_token_id": first_end if start is None else start,
            "eos_token_id": end,
            "pad_token_id": first_end if pad is None else pad,
            "context_length": length,
            "vocab_size": sizes.vocabulary,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": file,
                "head_size": sizes.head_dim,
                "hidden_size": sizes.hidden,
                "num_attention_heads": heads,
                "num_key_value_heads": sizes.kv_heads,
                "num_hidden_layers": sizes.layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": length,
            "min_length": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": False,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 1,
            "top_p": 1.0,
        },
    }


GRAPH, DATA = "model.onnx", "model.onnx.data"
# A protobuf file holds at most 2 GB and is built in memory whole: weights get a file of their own well before that.
ONE_FILE = 1 << 29


def refusal(kinds: frozenset[str]) -> str | None:
    """Why no model can be exported here: a package is missing. Layers of all `kinds` can be."""
    try:
        onnx_graph.require_packages()
    except UserError as error:
        return str(error).removeprefix("export onnx: ")
    return None


def export(model: Path, out: Path, progress: Progress, dtype: torch.dtype, one_file: int = ONE_FILE) -> Exported:
    """Fills the folder `out` with the model directory `model` as ONNX; floats are float32 or float16.

    one_file  bytes of weights up to which all is in model.onnx.

    Packed weights are held as they are packed, plain ones one at a time. What is made is run once where ONNX Runtime is
    installed (check.py), and the notes say what came of it. Raises UserError for what `open_checkpoint`,
    the tracer or the operators do not take, and for weights that float16 does not hold.
    """
    checkpoint = open_checkpoint(model)
    graph, sizes = onnx_graph.trace(checkpoint.path, dtype)
    made = assemble(checkpoint, graph, sizes, out, progress, dtype, one_file)
    return replace(made, notes=(*made.notes, check.sentence(checkpoint.path, out, made.bytes)))


write = partial(export, dtype=torch.float32)
write_fp16 = partial(export, dtype=torch.float16)


def assemble(
    checkpoint: Checkpoint,
    graph: "ir.Model",
    sizes: onnx_graph.Sizes,
    out: Path,
    progress: Progress,
    dtype: torch.dtype,
    one_file: int = ONE_FILE,
) -> Exported:
    """`export` from the traced graph on, which is filled with the checkpoint's weights."""
    name = "onnx" if dtype == torch.float32 else "onnx-fp16"
    filled = Filled(Weights(checkpoint), dtype)
    filled.fill(graph, lambda done, total: progress(f"export {name}", done, total))
    total = sum(v.const_value.nbytes for v in graph.graph.initializers.values() if v.const_value is not None)
    save(graph, out, external=total > one_file)
    copy_companions(checkpoint.path, out)
    # The graph says how its weights are held; these would tell a loader of safetensors.
    config = {k: v for k, v in checkpoint.config.items() if k not in ("quantization_config", "auto_map", "specpress")}
    write_json(out / "config.json", config)
    generation = checkpoint.path / "generation_config.json"
    said = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    write_json(out / FILE, genai_config(config, said, sizes, GRAPH))
    size = sum((out / file).stat().st_size for file in (GRAPH, DATA) if (out / file).is_file())
    losses = tuple(Loss(layer, error) for layer, error in sorted(filled.rounded.items()))
    return Exported(name, size, filled.kinds.total(), losses, _notes(filled, dtype))


class Filled:
    """Puts weights into a traced graph, and keeps account of it.

    rounded  layer → ‖W' − W‖ / ‖W‖, of plain weights that float16 rounded (known when they are written).
    kinds    how many packed layers were replaced by each kind of operator; their codes are the artifact's.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype):
        self.weights, self.dtype = weights, dtype
        self.rounded: dict[str, float] = {}
        self.kinds: Counter[str] = Counter()

    def fill(self, model: "ir.Model", progress: Callable[[int, int], None]) -> None:
        """Gives every initialiser of the traced graph its value, packed layers as operators over their codes."""
        from compress.export.onnx import layers

        graph = model.graph
        names = [name for name, value in graph.initializers.items() if value.const_value is None]
        for done, name in enumerate(names):
            progress(done, len(names))
            experts = self.weights.packed_experts(name)
            if experts is not None and layers.replace_experts(graph, name, experts, self.dtype):
                self.kinds["experts"] += 1
                continue
            found = None if experts is not None else self.weights.weight(name)
            linear = layers.find(graph, name)
            if isinstance(found, PackedWeight):
                check_kinds(["onnx"], {found.scheme.kind})
                if linear is None:
                    raise UserError(
                        f"{name}: expected a packed weight to be one linear layer's, found that the graph uses it in"
                        " another way: leave this layer out of the recipe's targets"
                    )
                layers.replace(graph, linear, found, self.dtype)
                self.kinds[found.scheme.activation if found.scheme.kind == "int8" else found.scheme.kind] += 1
            else:
                self._plain(graph, name, linear)
        progress(len(names), len(names))
        model.opset_imports.setdefault(layers.MICROSOFT, 1)

    def _plain(self, graph: "ir.Graph", name: str, linear: "Linear | None") -> None:
        import onnx_ir as ir
        from onnx_ir.tensor_adapters import from_torch_dtype

        value = graph.initializers[name]
        assert value.shape is not None
        shape = tuple(int(size) for size in value.shape)  # type: ignore[arg-type]
        transpose = linear is not None and len(linear.nodes) == 2
        if linear is not None and transpose:
            # The product wants (K, N): written so, rather than turned whenever the graph is loaded.
            before, product = linear.nodes
            product.replace_input_with(1, value)
            graph.remove(before, safe=True)
            value.shape = ir.Shape(shape[::-1])
        kind = from_torch_dtype(self.dtype)

        def read() -> ir.TensorProtocol:
            found = self.weights.weight(name)
            tensor = self._cast(name, expect_shape(name, plain(found), shape))
            return ir.Tensor((tensor.T if transpose else tensor).contiguous().numpy(), name=name)

        value.type = ir.TensorType(kind)
        value.const_value = ir.LazyTensor(read, kind, value.shape, name=name)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        cast = tensor.to(self.dtype)
        if self.dtype == torch.float16:
            if not bool(torch.isfinite(cast).all()):
                raise UserError(
                    f"{name}: expected weights that float16 holds, found {float(tensor.abs().max()):.3g}: export to"
                    " onnx, which has float32"
                )
            whole = tensor.float()
            error = float(torch.linalg.vector_norm(cast.float() - whole))
            if error and tensor.ndim > 1:
                self.rounded[name.removesuffix(".weight")] = error / float(torch.linalg.vector_norm(whole))
        return cast


def save(model: "ir.Model", out: Path, external: bool) -> None:
    """Writes model.onnx into `out`, with its weights in model.onnx.data where `external`."""
    import onnx_ir as ir

    try:
        ir.save(model, out / GRAPH, format="protobuf", external_data=DATA if external else None)
    except Exception as error:
        # Weights are read while they are written, and onnx_ir wraps what that raises.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, USER_ERRORS):
            cause = cause.__cause__
        if cause is not None:
            raise cause from None
        raise


def _notes(filled: Filled, dtype: torch.dtype) -> tuple[str, ...]:
    return told(
        filled.kinds["int8-token"]
        and "int8 layers round their inputs per token in the graph, as Specpress' kernels do",
        (filled.kinds["int8-token"] or filled.kinds["int8-tensor"])
        and "both factors of int8 products are unsigned: ONNX Runtime's sums are exact on every processor, with and"
        " without VNNI",
        filled.kinds["ternary"]
        and "ternary layers round their inputs to int8 per block, where Specpress' kernels do it per token",
        filled.kinds["experts"] and "experts take their inputs as floats",
        dtype == torch.float16 and "float16 is for GPUs: on a CPU ONNX Runtime turns most of it into float32",
    )
