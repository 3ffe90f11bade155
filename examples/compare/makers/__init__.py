"""One program per kind of model, or per compressor: a checkpoint in somebody's own format."""
