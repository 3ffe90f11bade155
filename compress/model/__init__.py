"""The model that is compressed: where it is, what it is made of, and what becomes of each tensor."""
