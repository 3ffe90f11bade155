"""A compressed model held against its original: statistics of tokens, paired choices, and a verdict with power."""
