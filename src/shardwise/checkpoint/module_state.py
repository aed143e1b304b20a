"""The state of a module to be filled from files, and then loaded by the module itself.

Parameters and buffers are filled in place. Other state that a module puts into `state_dict` it takes back in
`load_state_dict`: by `set_extra_state`, load hooks or its `_load_from_state_dict`.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError

EXTRA = nn.modules.module._EXTRA_STATE_KEY_SUFFIX  # how the name of what `get_extra_state` returns ends


def is_extra(name: str) -> bool:
    """Whether this is the name of an extra state. Its shape is the one that `get_extra_state` returned."""
    return name.rpartition(".")[2] == EXTRA


def fillable(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` with its parameters and buffers, and new memory for tensors that are neither."""
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    memory: dict[int, Tensor] = {id(x): x for x in chain(module.parameters(), module.buffers())}
    for name, x in state.items():
        if isinstance(x, Tensor):
            state[name] = memory.setdefault(id(x), x if id(x) in memory else torch.empty_like(x))
    return state


def load_filled(module: nn.Module, state: dict[str, Any]) -> None:
    """Load a filled `fillable` state into `module`."""
    if passed_over := module.load_state_dict(state, strict=False).unexpected_keys:
        raise CheckpointError(
            f"{passed_over[0]!r} is in state_dict() of the module, but its load_state_dict ignores it. "
            f"Fix: a _load_from_state_dict or a load hook that takes it, or a state_dict without it"
        )


def extra_state(manifest: Manifest, name: str, own: object) -> object:
    """Room for the extra state `name` in its form in the checkpoint, whatever the module has."""
    if name in manifest.tensors:
        return _room(manifest, name)
    if name in manifest.values:
        return None
    found: dict[str, Any] = {}
    for part in chain(manifest.tensors, manifest.values):
        if part.startswith(f"{name}."):
            *path, last = part.removeprefix(f"{name}.").split(".")
            holder = found
            for key in path:
                holder = holder.setdefault(key, {})
            holder[last] = _room(manifest, part) if part in manifest.tensors else None
    return found or own


def _room(manifest: Manifest, name: str) -> Tensor:
    stored = manifest.tensors[name]
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")


def check_extra_state(name: str, state: object) -> None:
    """Raise CheckpointError for an extra state that would change when it is saved and loaded."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if "." in str(key):
            raise CheckpointError(f"{name}: the key {key!r} of an extra state has a dot. Fix: a key without one")
        check_extra_state(f"{name}.{key}", value)
