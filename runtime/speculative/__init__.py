"""Speculative decoding: drafts, their verification, and how long they should be."""
