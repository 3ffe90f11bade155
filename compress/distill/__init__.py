"""Distillation: losses, and the stages that train a student to answer like its teacher."""
