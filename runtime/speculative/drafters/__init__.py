"""Drafters, one file each; `by_name` makes them."""
