"""Which class of transformers a checkpoint is loaded as: a language model, or one with a language model inside."""

from typing import Any

from runtime.errors import UserError


def auto_class(config: Any) -> Any:
    """The auto class that builds what `config.architectures` names, else the first that knows the configuration.

    Of a checkpoint with towers for images or sound that is the whole, whose logits of text are the language model's.
    Raises UserError for a configuration that none of them knows.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    autos = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    named = (getattr(config, "architectures", None) or [""])[0]
    found = {auto: auto._model_mapping[type(config)] for auto in autos if type(config) in auto._model_mapping}
    if not found:
        raise UserError(f"model_type {config.model_type!r} is another kind of model")
    return next((auto for auto, kind in found.items() if getattr(kind, "__name__", "") == named), next(iter(found)))


def decoder_path(model: Any) -> str:
    """Where the language model lies in a model that has towers besides; "" in one that is a language model alone."""
    if model.config.get_text_config(decoder=True).model_type == model.config.model_type:
        return ""
    decoder = model.get_decoder()
    return next((name for name, module in model.named_modules() if module is decoder), "")
