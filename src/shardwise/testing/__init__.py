"""Tools to test distributed code: many ranks in one process in milliseconds, or on real processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.testing.failures import DeadlockError
from shardwise.testing.worlds import World, world

if TYPE_CHECKING:
    from shardwise._models import MLPModule, MLPStacked, ModelArgs, RMSNormPython, Transformer
    from shardwise.testing.cases import (
        DEVICE_COUNT,
        DEVICE_TYPE,
        NUM_DEVICES,
        PG_BACKEND,
        DTensorOpTestBase,
        DTensorTestBase,
        skip_unless_torch_gpu,
        with_comms,
    )
    from shardwise.testing.converter import DTensorConverter
    from shardwise.testing.rule_checks import check_rows

# What needs torch is imported when it is used: pytest imports the plugin beside this in every run.
_HOMES = (
    "shardwise._models", "shardwise.testing.cases", "shardwise.testing.converter", "shardwise.testing.rule_checks"
)  # fmt: skip

__all__ = [
    "DEVICE_COUNT", "DEVICE_TYPE", "NUM_DEVICES", "PG_BACKEND", "DTensorConverter", "DTensorOpTestBase",
    "DTensorTestBase", "DeadlockError", "MLPModule", "MLPStacked", "ModelArgs", "RMSNormPython", "Transformer", "World",
    "check_rows", "skip_unless_torch_gpu", "with_comms", "world",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(home), name):
            return getattr(module, name)
    raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
