"""GGUF, llama.cpp's one-file format: weights, configuration and tokenizer, read without its library."""
