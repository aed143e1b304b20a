"""Optimizers in a checkpoint: what is saved of them, and what a program gets of it.

States are found by the names of parameters, and groups by the names of their parameters.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise._tensor import DTensor, plain
from shardwise.checkpoint.differences import Difference, compare, some
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.optimizer_states import ABOUT, IMPLEMENTATION, kept_states, new_state, room_for, values_of
from shardwise.embedding.fused import FusedOptimizer, is_of_other_columns
from shardwise.errors import CheckpointError

T = TypeVar("T")
StoredStates = dict[str, tuple[str, torch.Size | None]]  # by key: their names in the checkpoint, and shapes
Entry = Mapping[str, Any]  # of a group in a checkpoint: {"params": ["weight"], "class": "Adam", "lr": 0.1, …}

PREFIX = "optimizer."
GROUPS = "optimizer.param_groups"
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}


def by_name(given: T | Mapping[str, T] | Sequence[T] | None) -> dict[str, T]:
    """Optimizers or schedulers by name: the keys of a mapping, else "0", "1", …"""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    items = given if isinstance(given, Sequence) else [given]
    return {str(number): item for number, item in enumerate(items)}


def optimizer_state(module: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """States under the names of their parameters, and the groups as JSON."""
    names = _names_in(module, optimizers)
    state: dict[str, Any] = {}
    for optimizer in optimizers.values():
        if isinstance(optimizer, FusedOptimizer):
            optimizer.check_layouts()
        for parameter, entries in optimizer.state.items():
            if id(parameter) not in names:
                name = type(parameter).__name__
                raise CheckpointError(
                    f"the optimizer keeps state of a {name} that is not a parameter. "
                    f"Fix: optimizer.state[parameter] has the states; or save without it, as state_of(module)"
                )
            for key, value in entries.items():
                if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps a list of tensors, {key!r} of {names[id(parameter)]}, which "
                        f"cannot be saved: a state is one tensor. Fix: save without it, as state_of(module)"
                    )
                state[f"{PREFIX}{names[id(parameter)]}.{key}"] = value
    state[GROUPS] = [entry for *_, entry in _groups(optimizers, names)]
    return state


def _names_in(module: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[int, str]:
    """The name of each parameter of the optimizers in `module`, by identity."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for name, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in names:
                    raise CheckpointError(
                        f"parameter {index} of group {number} of optimizer {name!r} is not a parameter of the module. "
                        f"Fix: make the optimizer after the module was sharded, which replaces parameters"
                    )
                if id(parameter) in seen:
                    raise CheckpointError(
                        f"parameter {names[id(parameter)]} is in two optimizers. "
                        f"Fix: pass each parameter's optimizer once"
                    )
                seen.add(id(parameter))
    return names


def _groups(
    optimizers: Mapping[str, Optimizer], names: Mapping[int, str]
) -> Iterator[tuple[Optimizer, int, dict[str, Any]]]:
    """Each optimizer with the indices of its groups, and their saved form."""
    for name, optimizer in optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            fused = f"fused {optimizer.kinds[number].__name__}" if isinstance(optimizer, FusedOptimizer) else ""
            parameters = [names[id(parameter)] for parameter in group["params"]]
            entry = {"params": parameters, "optimizer": name, "class": fused or type(optimizer).__name__}
            yield optimizer, number, entry | values_of(group)


@dataclass(frozen=True)
class OptimizersFit:
    """The part of a checkpoint that fits optimizers, and the differences.

    Attributes:
        differences: what does not fit.
        known: the names in the checkpoint that were compared, whether they fit or not.
        orders: the positions of each optimizer's groups in the checkpoint.
        values: groups, and the hyper-parameters that they get.
        states: by name in the checkpoint, parameters with optimizer and group, and the states that they get. Other
            parameters keep their states.
    """

    differences: Sequence[Difference] = ()
    known: AbstractSet[str] = frozenset()
    orders: Mapping[Optimizer, Sequence[int]] = field(default_factory=dict)
    values: Sequence[tuple[dict[str, Any], Entry]] = ()
    states: Sequence[tuple[Optimizer, dict[str, Any], nn.Parameter, Mapping[str, str]]] = ()

    def room(self, manifest: Manifest) -> dict[str, Any]:
        """Tensors to load into, by name in the checkpoint: existing states, else new ones."""
        found: dict[str, Any] = {}
        for optimizer, group, parameter, names in self.states:
            for key, name in names.items():
                existing, stored = optimizer.state.get(parameter, {}).get(key), manifest.tensors.get(name)
                if stored is not None and not isinstance(existing, Tensor):
                    existing = new_state(key, stored, parameter, group)
                elif stored is not None and isinstance(optimizer, FusedOptimizer) and existing.shape != stored.shape:
                    existing = room_for(stored, existing)  # of another number of shards of columns
                found[name] = existing
        return found

    def apply(self, loaded: Mapping[str, Any]) -> None:
        """Give the loaded values to the optimizers."""
        for optimizer, _, parameter, names in self.states:
            before = optimizer.state.pop(parameter, {})
            if names:
                optimizer.state[parameter] = {key: _put(before.get(key), loaded[name]) for key, name in names.items()}
        for group, values in self.values:
            for key, value in values.items():
                if isinstance(old := group.get(key), Tensor):
                    with torch.no_grad():
                        old.fill_(value)
                else:
                    group[key] = value


def _put(existing: object, loaded: Any) -> object:
    """`loaded`; of another number of shards of columns, `existing` filled with the mean over them."""
    if not isinstance(existing, DTensor) or existing.shape == loaded.shape:
        return loaded
    own = plain(existing)
    own.copy_(plain(loaded).mean(1, keepdim=True).expand_as(own))
    return existing


def fit_optimizers(
    manifest: Manifest, module: nn.Module, optimizers: Mapping[str, Optimizer], subset: bool
) -> OptimizersFit:
    """Compare the optimizers of a checkpoint with those given; with `subset` it may have more."""
    names = _names_in(module, optimizers)
    if GROUPS not in manifest.values:
        name, _, key = GROUPS.partition(".")
        others = [other.removesuffix(f".{key}") for other in manifest.values if other.endswith(f".{key}")]
        called = f" (there is one called {others[0]!r}: save it under {name!r})" if others else ""
        return OptimizersFit([Difference((f"{GROUPS!r}{called}",), here="there")], {GROUPS})
    stored = _stored_groups(manifest)
    place_of = {frozenset(group["params"]): place for place, group in enumerate(stored)}
    here = {names[id(p)] for one in optimizers.values() for group in one.param_groups for p in group["params"]}
    found, differences = _stored_states(manifest, here.union(*place_of), here)
    orders, states, values = defaultdict[Optimizer, list[int]](list), [], []
    for optimizer, number, entry in _groups(optimizers, names):
        group, parameters = optimizer.param_groups[number], entry["params"]
        where = _where(entry) + (f", group {number}" if len(optimizer.param_groups) > 1 else "")
        place, saved = place_of.get(frozenset(parameters)), None
        if place is None:
            groups = [some(one["params"]) for one in stored if not set(parameters).isdisjoint(one["params"])]
            there = f"in groups of {' and of '.join(groups)}" if groups else None
            differences.append(Difference((where, f"parameters {some(parameters)}"), there, "in one group"))
        else:
            orders[optimizer].append(place)
            saved = {
                k: tuple(v) if isinstance(v, list) and isinstance(group.get(k), tuple) else v
                for k, v in stored[place].items()
            }
        found_there, of_group, of_parameters = _fit_group(where, optimizer, number, entry, saved, found)
        differences += found_there
        values.append((group, of_group))
        states += [
            (optimizer, group, parameter, of_parameters[name])
            for name, parameter in zip(parameters, group["params"], strict=True)
            if name in of_parameters
        ]
    if not subset:
        differences += [
            Difference((f"{_where(group)} of {some(group['params'])}",), stored="there")
            for group in stored
            if group["params"] and here.isdisjoint(group["params"])
        ]
    known = {GROUPS, *(full for of in found.values() for full, _ in of.values())}
    return OptimizersFit(differences, known, orders, values, states)


def _where(group: Entry) -> str:
    return f"optimizer {group.get('optimizer', '?')!r} ({group.get('class', '?')})"


def _fit_group(
    where: str, optimizer: Optimizer, number: int, here: Entry, saved: Entry | None, found: Mapping[str, StoredStates]
) -> tuple[list[Difference], dict[str, Any], dict[str, dict[str, str]]]:
    """The differences of a group, and the hyper-parameters and states that it gets.

    The checkpoint has `saved`, the group of the same parameters, and `found`, the states of each.
    """
    differences, values = list[Difference](), dict[str, Any]()
    same_class = saved is not None and saved.get("class", here["class"]) == here["class"]
    if saved is not None and same_class:
        fused = isinstance(optimizer, FusedOptimizer)
        required = optimizer.param_groups[number].keys() if fused else optimizer.defaults.keys()
        optional = (here.keys() | _OF_SCHEDULERS) - required | ABOUT | IMPLEMENTATION
        there, own = ({key: None for key in side if key not in optional} for side in (saved, here))
        differences += compare(there, own, (where, "hyper-parameters"))
        values = {key: value for key, value in values_of(saved).items() if key in here or key in _OF_SCHEDULERS}
    elif saved is not None:
        differences.append(Difference((where, "class"), saved["class"], here["class"]))
    named = {name: found.get(name, {}) for name in here["params"]}
    stored = {name: {key: size for key, (_, size) in states.items()} for name, states in named.items()}
    known = kept_states(optimizer, number, here)
    kept = stored if known is None else known
    unequal = {key: saved[key] for key, value in values_of(here).items() if saved and saved.get(key, value) != value}
    fresh = not all(stored.values())  # whether a parameter has no states in the checkpoint
    new = (fresh and kept_states(optimizer, number, here, steps=0)) or kept
    first = (fresh and unequal and kept_states(optimizer, number, {**here, **unequal})) or kept
    stored = {name: states or ({} if new[name] else first[name]) for name, states in stored.items()}
    of_states = [one for one in compare(stored, kept, (where,)) if not _is_mean(optimizer, number, one)]
    lacking = {one.path[1] for one in of_states if one.here is not None}
    if any(one.stored is None or one.here is None for one in of_states):
        of_states += [Difference((where, "hyper-parameters", key), was, here[key]) for key, was in unequal.items()]
        values = {}
    states = {
        name: {key: full for key, (full, _) in states.items() if key in kept[name]}
        for name, states in named.items()
        if name not in lacking and (same_class or (states and known is not None))
    }
    return differences + of_states, values, states


def _is_mean(optimizer: Optimizer, number: int, one: Difference) -> bool:
    """Whether a state of rows is stored for another number of shards of columns."""
    of_rows = optimizer.kinds[number].of_rows if isinstance(optimizer, FusedOptimizer) else ()
    shapes = [size for size in (one.stored, one.here) if isinstance(size, torch.Size)]
    return one.path[-1] in of_rows and len(shapes) == 2 and is_of_other_columns(*shapes)


def _stored_groups(manifest: Manifest) -> list[dict[str, Any]]:
    if not are_groups(groups := manifest.values[GROUPS]):
        raise CheckpointError(f"{GROUPS!r} in the checkpoint is not a list of groups. Fix: save with state_of")
    return groups


def are_groups(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Whether it has the form of an optimizer's `param_groups`."""
    return isinstance(value, list) and all(isinstance(of, dict) and isinstance(of.get("params"), list) for of in value)


def _stored_states(
    manifest: Manifest, owners: AbstractSet[str], here: AbstractSet[str]
) -> tuple[dict[str, StoredStates], list[Difference]]:
    """The states of each parameter of `owners` in the checkpoint, and states that look like those of `here`.

    torch's `get_state_dict` puts `state.` before the parameter. States of parameters of `here` under other names are a
    difference; otherwise they would be lost silently.
    """
    found, differences = dict[str, StoredStates](), list[Difference]()
    sizes = {name: torch.Size(tensor.shape) for name, tensor in manifest.tensors.items()}
    for name in (*manifest.tensors, *manifest.values):
        owner, _, key = name.removeprefix(PREFIX).rpartition(".")
        owner = owner if owner in owners else owner.removeprefix("state.")
        if not name.startswith(PREFIX) or name == GROUPS:
            continue
        if owner in owners:
            found.setdefault(owner, {})[key] = name, sizes.get(name)
        elif meant := next((end for end in _ends(owner) if end in here), None):
            looks = f"{name!r}, which looks like a state of {meant} and would be {PREFIX}{meant}.{key}"
            differences.append(Difference((looks,), stored="there"))
    return found, differences


def _ends(name: str) -> Iterator[str]:
    """`b.c` and `c` of `a.b.c`."""
    while "." in name:
        name = name.partition(".")[2]
        yield name
