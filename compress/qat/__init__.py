"""Training of quantised weights: BitNet's ternary layers, and quantisation-aware training of integers."""
