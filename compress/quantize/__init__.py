"""Ways to choose codes for a weight, one file per method."""
