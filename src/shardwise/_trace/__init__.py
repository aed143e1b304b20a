"""The communication trace, call sites in user code, and hooks for graph capture."""
