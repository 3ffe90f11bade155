"""What becomes of a row of logits: sampling parameters, distributions, noise, stopping, text."""
