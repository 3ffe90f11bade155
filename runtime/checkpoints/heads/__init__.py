"""Draft heads that others publish: what their files are called, and what their configurations say."""
