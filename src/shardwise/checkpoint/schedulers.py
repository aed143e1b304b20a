"""Learning-rate schedulers in a checkpoint: their states as JSON, found by name, and whether they fit."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint.manifest import Manifest
from shardwise.errors import CheckpointError

SCHEDULERS = "optimizer.schedulers"
_PAIRS, _FLOAT = "pairs of a mapping", "not finite"


def scheduler_state(schedulers: Mapping[str, LRScheduler]) -> list[dict[str, Any]]:
    """The `state_dict` of each scheduler as JSON, with its name and class."""
    return [
        {"name": name, "class": type(scheduler).__name__, "state": _as_json(scheduler.state_dict())}
        for name, scheduler in schedulers.items()
    ]


def fitting_schedulers(
    manifest: Manifest, schedulers: Mapping[str, LRScheduler], reordered: Sequence[Optimizer], subset: bool
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What `load_state_dict` of each scheduler that fits is to get, and the differences, a line each.

    Args:
        reordered: optimizers that have their groups in another order than in the checkpoint.
        subset: whether the checkpoint may have other schedulers.
    """
    saved = manifest.values.get(SCHEDULERS, [])
    if not isinstance(saved, list) or not all(
        isinstance(one, dict) and isinstance(one.get("state"), dict) and isinstance(one.get("name"), str)
        for one in saved
    ):
        raise CheckpointError(f"{SCHEDULERS!r} in the checkpoint is no list of schedulers. Fix: save with state_of")
    by_name = {one["name"]: one for one in saved}
    fitting, differences = {}, []
    for name, scheduler in schedulers.items():
        where, one = f"scheduler {name!r} ({type(scheduler).__name__})", by_name.pop(name, None)
        if one is None:
            differences.append(f"{where}: missing in the checkpoint")
            continue
        if one.get("class") != type(scheduler).__name__:
            differences.append(f"{where}: class {one.get('class')} in the checkpoint, {type(scheduler).__name__} here")
            continue
        own = scheduler.state_dict()
        problems = list(_differences(one["state"], _as_json(own), ""))
        if scheduler.optimizer in reordered:
            problems.append("it has learning rates by group, and the groups are in another order in the checkpoint")
        differences += [f"{where}: {problem}" for problem in problems]
        if not problems:
            fitting[name] = {key: _from_json(value, own.get(key)) for key, value in one["state"].items()}
    if not subset:
        differences += [
            f"scheduler {name!r} ({one.get('class')}): only in the checkpoint" for name, one in by_name.items()
        ]
    return fitting, differences


def _differences(saved: object, own: object, where: str) -> Iterator[str]:
    """What a state lacks or has too much; values may differ."""
    if isinstance(saved, dict) and isinstance(own, dict) and not {_PAIRS, _FLOAT} & (saved.keys() | own.keys()):
        for key in sorted(saved.keys() ^ own.keys()):
            yield f"{where}{key} {'only' if key in saved else 'missing'} in the checkpoint"
        for key in saved.keys() & own.keys():
            yield from _differences(saved[key], own[key], f"{where}{key}.")
    elif isinstance(saved, list) and isinstance(own, list):
        if len(saved) != len(own):
            yield f"{where[:-1]} has {len(saved)} items in the checkpoint, {len(own)} here"
        for number, (one, other) in enumerate(zip(saved, own, strict=False)):
            yield from _differences(one, other, f"{where}{number}.")


def _as_json(value: object) -> object:
    """`value` without what JSON lacks: numbers that are not finite, and keys that are no strings."""
    if isinstance(value, Tensor) and not value.ndim:
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(item) for key, item in value.items()}
        return {_PAIRS: [[_as_json(key), _as_json(item)] for key, item in value.items()]}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any, own: object) -> object:
    """What was saved as `value`, of the type of `own`."""
    if isinstance(value, dict):
        if _FLOAT in value:
            return float(value[_FLOAT])
        if _PAIRS in value:
            pairs = dict(value[_PAIRS])
            return Counter(pairs) if isinstance(own, Counter) else pairs
        inner = own if isinstance(own, Mapping) else {}
        return {key: _from_json(item, inner.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        others = own if isinstance(own, list | tuple) else ()
        items = [_from_json(item, others[n] if n < len(others) else None) for n, item in enumerate(value)]
        return tuple(items) if isinstance(own, tuple) else items
    return value
