"""The planner: which bits each layer gets, and who drafts, for the best model under a budget (`python -m compress.best`)."""
