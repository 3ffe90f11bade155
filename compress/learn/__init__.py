"""Training of what a packed model is made of, once its codes are there: scales, levels, norms, and roundings."""
