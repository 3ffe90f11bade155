"""The server: OpenAI's HTTP interface to an engine that runs in a process of its own. `python -m runtime.serve`.

A request's way: guard and app → bodies and protocol (what was asked) → plan (what the engine is asked) → run and front
(in flight) → worker (in the engine's process); and back: front → texts (tokens to text) → sse, or a whole answer.
"""
