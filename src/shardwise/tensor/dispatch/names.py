"""What to call a torch function in an error."""

from typing import Any


def name_of(func: Any) -> str:
    """What to call a function in an error."""
    if getattr(func, "__name__", "") == "__get__":
        return f".{func.__self__.__name__}"
    return str(getattr(func, "__name__", func))
