"""Ways to write an artifact for other programs, one file per kind."""
