"""Tasks of lm-eval (EleutherAI's evaluation harness) on our runtime; the extra `eval`."""
