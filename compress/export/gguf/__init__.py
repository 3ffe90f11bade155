"""GGUF exports: one file for llama.cpp, its blocks packed from the codes of the artifact, tokenizer included."""
