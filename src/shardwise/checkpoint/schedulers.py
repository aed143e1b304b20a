"""Learning-rate schedulers in a checkpoint: their states as JSON, found by name, and whether they fit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint.differences import Difference, compare
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


def fit_schedulers(
    manifest: Manifest, schedulers: Mapping[str, LRScheduler], orders: Mapping[Optimizer, Sequence[int]], subset: bool
) -> tuple[dict[str, dict[str, Any]], list[Difference]]:
    """The arguments of `load_state_dict` of each scheduler that fits, and the differences.

    `orders` are the positions of each optimizer's groups in the checkpoint.
    """
    saved = manifest.values.get(SCHEDULERS, [])
    if not isinstance(saved, list) or not all(
        isinstance(one, dict) and isinstance(one.get("state"), dict) and isinstance(one.get("name"), str)
        for one in saved
    ):
        raise CheckpointError(f"{SCHEDULERS!r} in the checkpoint is not a list of schedulers. Fix: save with state_of")
    stored, fitting = {one["name"]: one for one in saved}, dict[str, dict[str, Any]]()
    differences = list[Difference]()
    for name, scheduler in schedulers.items():
        kind, own, one = type(scheduler).__name__, scheduler.state_dict(), stored.pop(name, None)
        where, order = f"scheduler {name!r} ({kind})", orders.get(scheduler.optimizer, [])
        if one is None:
            problems = [Difference((where,), here="there")]
        elif one.get("class") != kind:
            problems = [Difference((where, "class"), one.get("class"), kind)]
        else:
            fitting[name] = state = _from_json(one["state"], own)
            problems = [*compare(state, own, (where,))]
            if order != sorted(order):  # it has learning rates by group
                problems.append(Difference((where, "groups of its optimizer"), f"in the order {order}", "in another"))
        if problems:
            fitting.pop(name, None)
        differences += problems
    if not subset:
        differences += (
            Difference((f"scheduler {x!r} ({one.get('class')})",), stored="there") for x, one in stored.items()
        )
    return fitting, differences


def _as_json(value: object) -> object:
    """`value` without numbers that are not finite and keys that are not strings, which JSON lacks."""
    if isinstance(value, Tensor) and not value.ndim:
        value = value.item()
    if isinstance(value, float) and not isfinite(value):
        return {_FLOAT: str(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _as_json(item) for key, item in value.items()}
        return {_PAIRS: [[_as_json(key), _as_json(item)] for key, item in value.items()]}
    return [_as_json(item) for item in value] if isinstance(value, list | tuple) else value


def _from_json(value: Any, own: object) -> Any:
    """The saved `value`, in the type of `own`."""
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
