"""The server: OpenAI's HTTP interface to an engine that runs in a process of its own. `python -m runtime.serve`.

A request's way: app (routes, guards) → bodies and protocol (what was asked) → plan (tokens, limits) → front (the engine's
process and what is in flight there) → worker (in that process) and back: front → texts (tokens to text) → sse, answers.
"""
