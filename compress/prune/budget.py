"""How many block weights have to go so that a share of the blocks, and nearly that share of the file, is gone."""

from math import ceil

# Of the share asked for, what the whole file has to lose; and how much more the blocks give up at most for it, where
# the embedding is large: a recipe that says 25 % must not quietly take half of a small model's blocks.
WHOLE = 0.8
MOST = 1.25


def weights_to_remove(share: float, blocks: int, outside: int) -> int:
    """Weights that the blocks have to lose: `share` of them, and more (up to 1.25 · share) until the model has lost
    0.8 · share of all its weights.

    blocks   weights of all blocks; outside: embedding, head and norms, which stay.
    Raises ValueError for a share that is not between 0 and 0.8.
    """
    if not 0 < share < WHOLE:
        raise ValueError(f"expected a share above 0 and below {WHOLE}, found {share}")
    return ceil(max(share * blocks, min(WHOLE * share * (blocks + outside), MOST * share * blocks)))
