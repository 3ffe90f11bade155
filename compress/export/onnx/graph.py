"""A model's graph for ONNX, traced by torch.onnx without its weights: they are put in afterwards, one at a time.

Inputs   input_ids and position_ids (batch, sequence) int64, attention_mask (batch, past + sequence) int64, and
         past_key_values.N.key and .value (batch, kv heads, past, head dim); past may be 0.
Outputs  logits (batch, sequence, vocabulary), the final hidden_states (batch, sequence, hidden), and present.N.key and
         .value (batch, kv heads, past + sequence, head dim).

The names are those that Optimum and ONNX Runtime GenAI use. Initialisers have the names of transformers' parameters.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compress.errors import UserError
from compress.model.structure import make_buffers

if TYPE_CHECKING:
    import onnx_ir as ir

# Attention that a growing pair of keys and values is the whole state of.
_ATTENTION = {"full_attention", "sliding_attention"}


def empty_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model that `folder`/config.json describes, its parameters fake tensors of `dtype` on the CPU.

    Raises UserError for layers whose state is more than keys and values.
    """
    from torch._subclasses import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds <= _ATTENTION:
        raise UserError(
            f"{folder.name}/config.json: expected layers whose state is keys and values, found"
            f" {', '.join(sorted(kinds - _ATTENTION))}: export this model to another form"
        )
    # Of transformers' ways through a mixture the one with no loop over experts and no shape that depends on the text.
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    options = {"experts_implementation": "batched_mm"} if any(isinstance(count, int) for count in counts) else {}
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype, **options).eval()
    for module in model.modules():
        make_buffers(model, module)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        made = {p: nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=False) for p in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = made.get(parameter)
    return model


# The least that MatMulNBits' neighbours and Split with a number of outputs need; ONNX Runtime reads newer ones, too.
OPSET = 21
# Sizes that the tracer must not take for constants: all different, none of them 0 or 1.
_BATCH, _SEQUENCE, _PAST = 2, 3, 5
_PREFIX = "model."
_LOGGERS = ("torch.onnx", "torch.export", "torch.__trace", "onnx_ir", "onnxscript")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the graph's inputs and outputs that are the same for every text."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int


class _Step(nn.Module):
    """The forward of one step, caches in and out as plain tensors."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        from transformers import DynamicCache

        # Without a configuration all layers keep everything: a sliding window is the mask's business then.
        cache = DynamicCache()
        for number, (key, value) in enumerate(past):
            cache.update(key, value, number)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        present = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return out.logits, out.hidden_states[-1], *present


def trace(folder: Path, dtype: torch.dtype = torch.float32) -> tuple["ir.Model", Sizes]:
    """The graph of the model that `folder`/config.json describes; weights, keys and values are of `dtype`.

    No weights are read or allocated: initialisers that are parameters have names, shapes and no values.

    Raises UserError for architectures whose state is more than keys and values, or that torch.onnx cannot trace, and
    where the packages of the extra `onnx` are missing.
    """
    require_packages()
    import onnxscript.optimizer

    model = empty_model(folder, dtype)
    sizes = _sizes(folder, model)
    names = [f"{{}}.{i}.{part}" for i in range(sizes.layers) for part in ("key", "value")]
    shape = (_BATCH, sizes.kv_heads, _PAST, sizes.head_dim)
    inputs = ["input_ids", "attention_mask", "position_ids", *(name.format("past_key_values") for name in names)]
    outputs = ["logits", "hidden_states", *(name.format("present") for name in names)]
    try:
        with _quiet(), torch.no_grad():
            program = torch.onnx.export(
                _Step(model),
                kwargs={
                    "input_ids": torch.ones(_BATCH, _SEQUENCE, dtype=torch.int64),
                    "attention_mask": torch.ones(_BATCH, _PAST + _SEQUENCE, dtype=torch.int64),
                    "position_ids": torch.arange(_PAST, _PAST + _SEQUENCE).repeat(_BATCH, 1),
                    "past": [tuple(torch.zeros(shape, dtype=dtype) for _ in "kv") for _ in range(sizes.layers)],
                },
                dynamic_shapes=_dynamic(sizes),
                input_names=inputs,
                output_names=outputs,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
            assert program is not None
            graph = program.model.graph
            for value in graph.initializers.values():
                if value.name.startswith(_PREFIX) and _is_parameter(model, value.name):
                    value.const_value = None
            onnxscript.optimizer.optimize_ir(program.model)
    except Exception as error:  # a tracer that raises whatever its many layers do
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise UserError(
            f"{folder.name}: expected a model that torch.onnx can trace, found a {type(model).__name__} that it cannot"
            f" ({reason}): export it to another form"
        ) from error
    _tidy(program.model, sizes)
    return program.model, sizes


def require_packages() -> None:
    """Raises UserError where what the exporter needs is not installed."""
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"export onnx: expected the packages of the extra `onnx`, found that {error.name} is missing: pip install"
            ' "specpress[onnx]"'
        ) from error


def _sizes(folder: Path, model: Any) -> Sizes:
    config = model.config
    heads = config.num_attention_heads
    if getattr(config, "is_heterogeneous", False):
        raise UserError(
            f"{folder.name}/config.json: expected keys of one shape in all layers, found several: export this model to"
            " another form"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not all(isinstance(size, int) for size in (kv_heads, head_dim)):
        raise UserError(
            f"{folder.name}/config.json: expected one number of heads for all layers, found {kv_heads} and {head_dim}:"
            " export this model to another form"
        )
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return Sizes(config.num_hidden_layers, kv_heads, head_dim, config.hidden_size, vocabulary)


def _dynamic(sizes: Sizes) -> dict[str, Any]:
    batch, sequence, cached = (torch.export.Dim(name) for name in ("batch", "sequence", "past"))
    rows, past = {0: batch, 1: sequence}, {0: batch, 2: cached}
    return {
        "input_ids": rows,
        "attention_mask": {0: batch, 1: torch.export.Dim.DYNAMIC},
        "position_ids": rows,
        "past": [(past, past) for _ in range(sizes.layers)],
    }


def _is_parameter(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.removeprefix(_PREFIX).rpartition(".")
    try:
        return leaf in model.get_submodule(owner)._parameters
    except AttributeError:
        return False


def _tidy(model: "ir.Model", sizes: Sizes) -> None:
    """Gives initialisers transformers' names and axes names that say what they are."""
    import onnx_ir as ir

    graph = model.graph
    for value in list(graph.initializers.values()):
        assert value.name is not None
        value.metadata_props.clear()
        if value.name.startswith(_PREFIX):
            value.name = value.name.removeprefix(_PREFIX)
    for node in graph:
        # Where in whose source each node came from, with paths of this machine.
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            # They carry the tracer's symbols; ONNX Runtime infers its own.
            value.shape = None
            value.metadata_props.clear()
    axes: dict[str, list[int | str]] = {
        "past_key_values": ["batch", sizes.kv_heads, "past", sizes.head_dim],
        "present": ["batch", sizes.kv_heads, "total", sizes.head_dim],
        "attention_mask": ["batch", "total"],
        "logits": ["batch", "sequence", sizes.vocabulary],
        "hidden_states": ["batch", "sequence", sizes.hidden],
    }
    for value in (*graph.inputs, *graph.outputs):
        assert value.name is not None
        dtype = value.dtype
        value.shape = ir.Shape(axes.get(value.name.split(".")[0], ["batch", "sequence"]))
        value.dtype = dtype
        value.metadata_props.clear()
    model.metadata_props.clear()
    graph.metadata_props.clear()
    graph.name, graph.doc_string = "model", None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the tracer's remarks on operators that are not used, and on weights that it does not have, to itself."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
