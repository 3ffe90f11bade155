"""Distillation: what a student learns from a teacher, from whose text, and how that is measured."""
