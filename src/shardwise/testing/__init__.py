"""Tools to test distributed code: many ranks in one process in milliseconds, or on real processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.testing.failures import DeadlockError, SendError
from shardwise.testing.worlds import World, world

if TYPE_CHECKING:
    from shardwise.models import (
        Attention,
        ExpertLayer,
        Experts,
        FeedForward,
        MLPModule,
        MLPStacked,
        ModelArgs,
        RMSNormPython,
        Transformer,
        TransformerBlock,
    )
    from shardwise.testing.truth import check_rows

# What needs torch is imported when it is used: pytest imports the plugin beside this in every run.
_HOMES = {
    "shardwise.models": (
        "Attention", "ExpertLayer", "Experts", "FeedForward", "MLPModule", "MLPStacked", "ModelArgs", "RMSNormPython",
        "Transformer", "TransformerBlock",
    ),
    "shardwise.testing.truth": ("check_rows",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Attention", "DeadlockError", "ExpertLayer", "Experts", "FeedForward", "MLPModule", "MLPStacked", "ModelArgs",
    "RMSNormPython", "SendError", "Transformer", "TransformerBlock", "World", "check_rows", "world",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
    return getattr(import_module(home), name)
