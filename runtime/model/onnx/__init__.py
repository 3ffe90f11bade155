"""Exports to ONNX as decoders: sessions of ONNX Runtime, their keys and values, and their graphs' inputs."""
