"""Which linear layers transformers' loaders of packed weights cannot take, whatever their shape."""

from torch import nn

from compress.errors import UserError
from compress.model.structure import ModelStructure, Parameter
from runtime.formats.schemes import CodeKind

# What stands in the place of "weight" in our own formats (runtime.formats.transformers).
_STORED = {"specpress-ternary": ("weight_patterns",), "specpress-trellis": ("weight_tiles", "weight_levels")}


def refusal(model: ModelStructure, tensor: str, parameter: Parameter, codes: CodeKind) -> str | None:
    """Why a linear layer, whose weight is `tensor` of the checkpoint, has to stay plain; None where it need not.

    Asks the model on the meta device what the loaders will ask the real one.
    """
    module = model.model.get_submodule(parameter.module)
    kind, library = type(module).__name__, codes.library
    if parameter.kind == "conv1d":
        return None if library == "bitsandbytes" else f"a Conv1D, which {library} cannot hold: nf4 can"
    if library == "bitsandbytes" and _kept_in_float32(model, parameter.module):
        return "transformers keeps it in float32 beside bitsandbytes layers: int8-dynamic can hold it"
    if library == "bitsandbytes" and type(module) is not nn.Linear:
        return f"a {kind}, which {library} does not replace: int8-dynamic can hold it"
    own = _STORED.get(library)
    if codes.layout != "pack-quantized" and own is None:
        return None
    if own is not None and not isinstance(module, nn.Linear):
        return f"a {kind}, which {library} does not replace: int8-dynamic can hold it"
    stored = own or ("weight_packed",)
    if not model.names.survives(tensor, (*stored, "weight_scale", "weight_shape")):
        return "transformers renames it as a plain weight alone: int8-dynamic can hold it"
    if not _initialises(model, parameter.module):
        return "transformers' initialisation of this model asks for its plain weight: int8-dynamic can hold it"
    return None


def _kept_in_float32(model: ModelStructure, path: str) -> bool:
    kept: set[str] = set(model.model._keep_in_fp32_modules or ()) | set(model.model._keep_in_fp32_modules_strict or ())
    return not kept.isdisjoint(path.split("."))


def _initialises(model: ModelStructure, path: str) -> bool:
    """Whether transformers can go through a model's initialisation, as it does after loading, without this weight."""
    module = model.model.get_submodule(path)
    parameters = module._parameters
    module._parameters = {name: p for name, p in parameters.items() if name != "weight"}
    try:
        while path:
            model.model._init_weights(model.model.get_submodule(path))
            path = path.rpartition(".")[0]
    except AttributeError as error:
        return "'weight'" not in str(error)
    finally:
        module._parameters = parameters
    return True


def check_apart(model: ModelStructure, codes: CodeKind) -> None:
    """Raises UserError for experts that transformers takes apart for a library, and then finds no tensors for."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

    for module in model.model.modules():
        kind = type(module).__name__
        if codes.library in MODULES_TO_PATCH_FOR_QUANTIZATION.get(kind, {}).get("quantization_methods", ()):
            raise UserError(
                f"{type(model.model).__name__}: beside {codes.library} layers transformers loads {kind} in another form"
                " than the checkpoint has: this architecture is quantised only by recipes that do not train"
            )
