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
_HOMES = {
    "shardwise._models": ("MLPModule", "MLPStacked", "ModelArgs", "RMSNormPython", "Transformer"),
    "shardwise.testing.cases": (
        "DEVICE_COUNT", "DEVICE_TYPE", "DTensorOpTestBase", "DTensorTestBase", "NUM_DEVICES", "PG_BACKEND",
        "skip_unless_torch_gpu", "with_comms",
    ),
    "shardwise.testing.converter": ("DTensorConverter",),
    "shardwise.testing.rule_checks": ("check_rows",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DEVICE_COUNT", "DEVICE_TYPE", "NUM_DEVICES", "PG_BACKEND", "DTensorConverter", "DTensorOpTestBase",
    "DTensorTestBase", "DeadlockError", "MLPModule", "MLPStacked", "ModelArgs", "RMSNormPython", "Transformer", "World",
    "check_rows", "skip_unless_torch_gpu", "with_comms", "world",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise.testing' has no attribute {name!r}")
    return getattr(import_module(home), name)
