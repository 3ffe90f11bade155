"""Whether a compressed model is what it should be, whoever wrote it: `python -m compress.check`."""
