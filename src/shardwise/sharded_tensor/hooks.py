"""State-dict hooks for `DTensor`s that are plain attributes of a module, not parameters."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.tensor.dtensor import DTensor


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Add every `DTensor` that is a plain attribute of `module`, or of a submodule, to its state dict.

    For `module._register_state_dict_hook(state_dict_hook)`.
    """
    for key, owner, name in _attributes(module, prefix):
        value = vars(owner)[name]
        if isinstance(value, DTensor):
            destination[key] = value


def pre_load_state_dict_hook(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Set every attribute for which the state dict has a `DTensor` to that `DTensor`.

    For `module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)`. With `strict=True` it reports `DTensor`s
    of the module that the state dict lacks or has in another shape.
    """
    for key, owner, name in list(_attributes(module, prefix)):
        current, loaded = vars(owner)[name], state_dict.get(key)
        if isinstance(loaded, DTensor):
            if isinstance(current, DTensor) and current.shape != loaded.shape:
                error_msgs.append(f"{key}: the module has shape {tuple(current.shape)}, got {tuple(loaded.shape)}.")
                continue
            setattr(owner, name, loaded)
            del state_dict[key]  # torch would look for a parameter of this name
        elif strict and isinstance(current, DTensor) and key not in state_dict:
            missing_keys.append(key)


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    """State-dict keys, owners and names of plain attributes."""
    for path, owner in module.named_modules():
        for name in vars(owner):
            yield f"{prefix}{path}{'.' if path else ''}{name}", owner, name
