"""Caches of keys and values: contiguous memory per request, or pages that requests share."""
