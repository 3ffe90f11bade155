"""Decoders: from a path to a model that runs, on the CPU, on a GPU, on ONNX Runtime or through transformers."""
