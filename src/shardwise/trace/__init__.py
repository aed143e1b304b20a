"""Communication events, user stack frames, and hooks for graph capture."""
