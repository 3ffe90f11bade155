"""What of a model is rotated (the stage `rotate`), as config.json says it:

    "specpress": {"rotation": {"residual": 512, "values": 64, "seed": 0, "untied": true}}

    residual, values  sizes of what is turned: the residual stream, and each head's values; 0: nothing.
    seed    of the signs of the residual stream's rotation; those of the values' are drawn with the next number.
    untied  whether the head, which was the embedding, has become a table of its own.

Weights compute what they did before, so that nothing here is needed to run the model; NORMS holds the norms' weights as
they were, by their tensors' names, for they are folded into what reads them. A GGUF file says the same in keys of its
metadata, "specpress.rotation.residual" and so on (three of integers and a bool), and has no norms.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.errors import UserError

NORMS = "rotation/norms.safetensors"
GGUF_KEY = "specpress.rotation.{}"
_KEYS = {"residual": int, "values": int, "seed": int, "untied": bool}


@dataclass(frozen=True)
class RotationRecord:
    """The mapping `specpress.rotation`."""

    residual: int
    values: int
    seed: int
    untied: bool

    def changed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json that are others with it."""
        ours = {**config.get("specpress", {}), "rotation": asdict(self)}
        return {"specpress": ours} | ({"tie_word_embeddings": False} if self.untied else {})


def rotation_of(config: Mapping[str, Any], shown: str = "config.json") -> RotationRecord | None:
    """What a config.json says; None: nothing is rotated.

    Raises UserError, naming the file `shown`, for a mapping that says it wrongly.
    """
    said = config.get("specpress")
    found = said.get("rotation") if isinstance(said, Mapping) else None
    if found is None:
        return None
    if not isinstance(found, Mapping) or any(type(found.get(key)) is not kind for key, kind in _KEYS.items()):
        raise UserError(
            f"{shown}: specpress.rotation must have {', '.join(_KEYS)} as the stage rotate writes them, found "
            f"{found!r}; copy the file again"
        )
    return RotationRecord(**{key: found[key] for key in _KEYS})


def said_in(metadata: Mapping[str, Any], shown: str) -> dict[str, Any]:
    """The keys of a config.json that say what a GGUF file's metadata do; none where nothing is rotated.

    Raises UserError, naming the file `shown`, for metadata that say it wrongly.
    """
    keys = {name: GGUF_KEY.format(name) for name in _KEYS}
    found = {name: metadata[key] for name, key in keys.items() if key in metadata}
    config: dict[str, Any] = {"specpress": {"rotation": found}} if found else {}
    rotation_of(config, shown)
    return config
