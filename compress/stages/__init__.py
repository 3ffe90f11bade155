"""Stages that work on blocks, one file each."""
