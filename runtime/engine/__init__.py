"""The engine: schedules requests, drafts, runs the target, verifies, rolls back."""
