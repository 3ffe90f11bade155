"""How a GGUF file stores numbers: tensor types by ggml's numbers, and the bytes of their blocks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """A tensor type: `weights` numbers of a row share a block of `bytes` bytes."""

    name: str
    number: int
    weights: int
    bytes: int

    @property
    def plain(self) -> bool:
        """Whether the type is floats as they are."""
        return self.weights == 1

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row. Raises ValueError where blocks do not divide it."""
        if inputs % self.weights:
            raise ValueError(f"{self.name} has blocks of {self.weights}, which do not divide rows of {inputs}")
        return inputs // self.weights * self.bytes


F32 = BlockType("F32", 0, 1, 4)
F16 = BlockType("F16", 1, 1, 2)
BF16 = BlockType("BF16", 30, 1, 2)
Q4_0 = BlockType("Q4_0", 2, 32, 18)
Q4_1 = BlockType("Q4_1", 3, 32, 20)
Q5_0 = BlockType("Q5_0", 6, 32, 22)
Q5_1 = BlockType("Q5_1", 7, 32, 24)
Q8_0 = BlockType("Q8_0", 8, 32, 34)
Q4_K = BlockType("Q4_K", 12, 256, 144)
Q5_K = BlockType("Q5_K", 13, 256, 176)
Q6_K = BlockType("Q6_K", 14, 256, 210)
TQ1_0 = BlockType("TQ1_0", 34, 256, 54)
TQ2_0 = BlockType("TQ2_0", 35, 256, 66)

TYPES: dict[int, BlockType] = {
    kind.number: kind for kind in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0)
}
"""The types that are read, by number."""

UNREAD: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    39: "MXFP4",
    40: "NVFP4",
}
"""Names of types that are not read, so that a refusal can say what it met."""
