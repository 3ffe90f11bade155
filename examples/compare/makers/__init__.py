"""One program per kind of model: random weights in an engine's own format."""
