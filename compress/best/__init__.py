"""The planner: which bits each layer gets, and who drafts, under a budget (`python -m compress.best`)."""
