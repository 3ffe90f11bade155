"""`python -m runtime.bench gpu …`: what a GPU is measured by. Every command runs on a CPU, too, at toy sizes."""
