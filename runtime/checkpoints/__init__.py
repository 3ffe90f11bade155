"""Model files, ours or anybody's: safetensors directories and GGUF, read one tensor at a time."""
