"""Hooks by which `DTensor`s that are plain attributes of a module, no parameters, take part in its state dict."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.tensor.dtensor import DTensor


def state_dict_hook(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Put every `DTensor` that is a plain attribute of `module`, or of a module in it, into its state dict.

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
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Let every attribute whose name is in the state dict, with a `DTensor`, be that `DTensor`.

    For `module.register_load_state_dict_pre_hook(pre_load_state_dict_hook)`; works with `strict=True` too, which
    reports `DTensor`s of the module that the state dict lacks or has in another shape.
    """
    for key, owner, name in list(_attributes(module, prefix)):
        mine, loaded = vars(owner)[name], state_dict.get(key)
        if isinstance(loaded, DTensor):
            if isinstance(mine, DTensor) and mine.shape != loaded.shape:
                error_msgs.append(f"{key}: the module has shape {tuple(mine.shape)}, got {tuple(loaded.shape)}.")
                continue
            setattr(owner, name, loaded)
            del state_dict[key]  # it is no parameter, for which torch would look next
        elif strict and isinstance(mine, DTensor) and key not in state_dict:
            missing_keys.append(key)


def _attributes(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str]]:
    """Plain attributes, each with its key in a state dict."""
    for path, owner in module.named_modules():
        for name in vars(owner):
            yield f"{prefix}{path}{'.' if path else ''}{name}", owner, name
