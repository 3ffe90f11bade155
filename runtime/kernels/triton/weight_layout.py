"""How the inputs of a packed weight are cut for the kernels: groups, chunks, bytes.

A chunk is a run of 32, 64 or 128 inputs: one tensor-core product. A byte holds the same place of 1, 2 or 4 neighbouring
chunks (its lowest bits the first), so one row of bytes is loaded as it lies and each chunk is unpacked by itself. Of
nf4, whose levels are looked up by four codes side by side, half a word of four bytes holds four places of one of two
chunks instead (the lower half the first). What is not there (a group that is no multiple of 32, a last byte that is not
full) is zero in codes, inputs and scales, and adds exact zeros.
"""

from dataclasses import dataclass

# What one 8-bit tensor-core product takes at least, and what is loaded at once at most.
CHUNKS = (128, 64, 32)
PER_BYTE = {"int8": 1, "int4": 2, "uint4": 2, "nf4": 2, "ternary": 4, "planes": 2}


@dataclass(frozen=True)
class Cut:
    """Inputs of one row, K of them.

    group     inputs that share a scale (K where the row has one), `padded` as they are stored, `groups` of them.
    columns   groups as they are stored: `groups`, rounded up where the last byte is shared with groups that are not
              there.
    chunk     inputs of one product; `per_byte` chunks share a row of `chunk` bytes, which is called a unit.
    units     units of one group; 0: each chunk of a unit is a group of its own.
    """

    inputs: int
    group: int
    padded: int
    groups: int
    columns: int
    chunk: int
    per_byte: int
    units: int

    @property
    def stored(self) -> int:
        """Inputs as they are stored: a row of rounded inputs has as many bytes."""
        return self.columns * self.padded

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of codes."""
        return self.stored // self.per_byte


def cut(inputs: int, group_size: int, per_byte: int) -> Cut:
    """The cut of `inputs` in groups of `group_size` (0: one a row), `per_byte` codes in a byte."""
    group = min(group_size or inputs, inputs)
    groups = -(-inputs // group)
    whole = -(-group // CHUNKS[-1]) * CHUNKS[-1]
    if groups > 1 and whole in CHUNKS:
        columns = -(-groups // per_byte) * per_byte
        return Cut(inputs, group, whole, groups, columns, whole, per_byte, 0)

    def padded(chunk: int) -> int:
        return -(-group // (chunk * per_byte)) * chunk * per_byte

    # The least padding, and of equals the longest loads.
    chunk = min(CHUNKS, key=lambda size: (padded(size), -size))
    return Cut(inputs, group, padded(chunk), groups, groups, chunk, per_byte, padded(chunk) // (chunk * per_byte))
