"""Training: one loop for healing, ternary weights, quantisation-aware training, drafts and Medusa heads."""
