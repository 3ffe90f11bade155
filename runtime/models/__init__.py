"""`python -m runtime.models`: how each causal language model of the installed transformers runs here."""
