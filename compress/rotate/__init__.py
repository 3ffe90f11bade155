"""Rotations of a model that are folded into its weights: made (stage.py), undone (unfold.py), and the matrices."""
