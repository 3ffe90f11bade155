"""`python -m runtime.audit`: whether an engine's speculative decoding is lossless, ours or anybody's."""
