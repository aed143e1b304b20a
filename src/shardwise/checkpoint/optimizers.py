"""Optimizers in a checkpoint: what is saved of them, and whether what was saved fits those that are here.

The states of a parameter are found by its name, and groups by the names of their parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise._tensor import DTensor, plain
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.optimizer_states import (
    ABOUT,
    IMPLEMENTATION,
    States,
    new_state,
    room_for,
    states_of_new,
    values_of,
)
from shardwise.embedding.fused import FusedOptimizer, is_of_other_columns
from shardwise.errors import CheckpointError

T = TypeVar("T")

PREFIX = "optimizer."
GROUPS = "optimizer.param_groups"
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
SHOWN = 3  # of a list of parameters, how many an error names


def by_name(given: T | Mapping[str, T] | Sequence[T] | None) -> dict[str, T]:
    """Optimizers or schedulers under their names: those of a mapping, else "0", "1", …"""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    items = given if isinstance(given, Sequence) else [given]
    return {str(number): item for number, item in enumerate(items)}


def optimizer_state(module: nn.Module, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """States under the names of their parameters, and the groups as JSON.

    Raises:
        CheckpointError: a parameter that `module` lacks, or that two optimizers have, or a list of tensors as state.
        PlanError: states of tables that have no layout.
    """
    names = _names_in(module, optimizers)
    state: dict[str, Any] = {}
    for optimizer in optimizers.values():
        if isinstance(optimizer, FusedOptimizer):
            optimizer.check_layouts()
        for parameter, entries in optimizer.state.items():
            if id(parameter) not in names:
                name = type(parameter).__name__
                raise CheckpointError(
                    f"the optimizer keeps state of a {name} that is no parameter. "
                    f"Fix: optimizer.state[parameter] has the states; or save without it, as state_of(module)"
                )
            for key, value in entries.items():
                if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps a list of tensors, {key!r} of {names[id(parameter)]}, which "
                        f"cannot be saved: a state is one tensor. Fix: save without it, as state_of(module)"
                    )
                state[f"{PREFIX}{names[id(parameter)]}.{key}"] = value
    state[GROUPS] = [
        _as_json(name, optimizer, number, names)
        for name, optimizer in optimizers.items()
        for number in range(len(optimizer.param_groups))
    ]
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
                        f"parameter {index} of group {number} of optimizer {name!r} is none of the module's. "
                        f"Fix: make the optimizer after the module was sharded, which replaces parameters"
                    )
                if id(parameter) in seen:
                    raise CheckpointError(
                        f"parameter {names[id(parameter)]} is of two optimizers. "
                        f"Fix: pass each parameter's optimizer once"
                    )
                seen.add(id(parameter))
    return names


def _as_json(name: str, optimizer: Optimizer, number: int, names: Mapping[int, str]) -> dict[str, Any]:
    group = optimizer.param_groups[number]
    parameters = [names[id(parameter)] for parameter in group["params"]]
    return {"params": parameters, "optimizer": name, "class": _class_of(optimizer, number), **values_of(group)}


def _class_of(optimizer: Optimizer, number: int) -> str:
    """What updates the parameters of a group."""
    if isinstance(optimizer, FusedOptimizer):
        return f"fused {optimizer.kinds[number].__name__}"
    return type(optimizer).__name__


@dataclass
class FittingState:
    """What of a checkpoint goes into the optimizers, and what does not.

    Attributes:
        state: what is loaded, by its name in the checkpoint.
        differences: what does not fit, a line each; without them, everything fits.
        known: the names in the checkpoint that were compared, whether they fit or not.
        entries: what the states of each parameter are called in `state`.
        kept: parameters that keep the states that they have.
        groups: those whose hyper-parameters are loaded, and what was saved of them.
        reordered: optimizers that have their groups in another order.
        means: states of rows whose columns were sharded otherwise, by name; `state` has what was saved.
    """

    state: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    entries: dict[nn.Parameter, dict[str, str]] = field(default_factory=dict)
    kept: set[nn.Parameter] = field(default_factory=set)
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    reordered: list[Optimizer] = field(default_factory=list)
    means: dict[str, DTensor] = field(default_factory=dict)

    def apply(self, optimizers: Iterable[Optimizer], loaded: Mapping[str, Any]) -> None:
        """Give the optimizers what was loaded of `state`."""
        states = {name: loaded[name] for name in self.state}
        for group, saved in self.groups:
            _restore_group(group, saved)
        for name, target in self.means.items():
            own = plain(target)
            own.copy_(plain(states[name]).mean(1, keepdim=True).expand_as(own))
            states[name] = target
        for optimizer in optimizers:
            before = dict(optimizer.state)
            optimizer.state.clear()
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter in self.entries:
                    names = self.entries[parameter]
                    optimizer.state[parameter] = {key: states[name] for key, name in names.items()}
                elif parameter in self.kept and parameter in before:
                    optimizer.state[parameter] = before[parameter]


def fitting_state(
    manifest: Manifest, module: nn.Module, optimizers: Mapping[str, Optimizer], subset: bool
) -> FittingState:
    """Compare what a checkpoint has of optimizers with those that are here; changes nothing.

    Args:
        subset: whether the checkpoint may have other optimizers and groups.
    """
    fit = FittingState(known={GROUPS})
    names = _names_in(module, optimizers)
    if GROUPS not in manifest.values:
        name, _, key = GROUPS.partition(".")
        others = [other.removesuffix(f".{key}") for other in manifest.values if other.endswith(f".{key}")]
        called = f" called {name!r}; there is one called {others[0]!r}: save it under {name!r}" if others else ""
        fit.differences.append(f"there is no optimizer in the checkpoint{called}")
        fit.kept.update(p for one in optimizers.values() for group in one.param_groups for p in group["params"])
        return fit
    groups = _saved_groups(manifest)
    left = list(groups)
    here = {names[id(p)] for one in optimizers.values() for group in one.param_groups for p in group["params"]}
    owners = {name for group in groups for name in group["params"]} | here
    stored = _stored_states(manifest, owners, here, fit)
    for name, optimizer in optimizers.items():
        order = []
        for number, group in enumerate(optimizer.param_groups):
            mine = [names[id(parameter)] for parameter in group["params"]]
            saved = next((one for one in left if set(one["params"]) == set(mine)), None)
            if saved is not None:
                left.remove(saved)
                order.append(groups.index(saved))
            _Group(manifest, name, optimizer, number, mine, saved).compare(stored, left, fit)
        if order != sorted(order):
            fit.reordered.append(optimizer)
    for group in left:
        if not subset and here.isdisjoint(group["params"]):
            what = f"optimizer {group.get('optimizer', '?')!r} ({group.get('class', '?')})"
            fit.differences.append(f"{what} of {_some(group['params'])}: only in the checkpoint")
    return fit


def _stored_states(
    manifest: Manifest, owners: AbstractSet[str], here: AbstractSet[str], fit: FittingState
) -> dict[str, dict[str, str]]:
    """What the states of each parameter of `owners` are called in the checkpoint, by parameter and state.

    `get_state_dict` of torch puts `state.` before the parameter. States of parameters of `here` under other names are
    a difference: they would be lost without a word.
    """
    stored: dict[str, dict[str, str]] = {}
    for name in (*manifest.tensors, *manifest.values):
        if not name.startswith(PREFIX) or name == GROUPS:
            continue
        owner, _, key = name.removeprefix(PREFIX).rpartition(".")
        owner = owner if owner in owners else owner.removeprefix("state.")
        if owner in owners:
            stored.setdefault(owner, {})[key] = name
            fit.known.add(name)
        elif meant := next((parent for parent in _ends(owner) if parent in here), None):
            fit.differences.append(f"{name!r} looks like a state of {meant}, which would be {PREFIX}{meant}.{key}")
    return stored


def _ends(name: str) -> Iterator[str]:
    """`b.c` and `c` of `a.b.c`."""
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _saved_groups(manifest: Manifest) -> list[dict[str, Any]]:
    groups = manifest.values[GROUPS]
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise CheckpointError(f"{GROUPS!r} in the checkpoint is no list of groups. Fix: save with state_of")
    return groups


@dataclass
class _Group:
    """A group of an optimizer, and the one of the same parameters in the checkpoint, if there is one."""

    manifest: Manifest
    name: str
    optimizer: Optimizer
    number: int
    parameters: list[str]
    saved: dict[str, Any] | None

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.number]

    def compare(
        self, stored: Mapping[str, dict[str, str]], others: Sequence[dict[str, Any]], fit: FittingState
    ) -> None:
        """Add to `fit` what fits, and the differences.

        Args:
            stored: what each state of a parameter is called in the checkpoint.
            others: groups of the checkpoint that have other parameters.
        """
        same_class = self.saved is not None and self._kind() == self.saved.get("class", self._kind())
        lines = [*self._groups_differ(others), *self._hyper_parameters_differ()]
        own = states_of_new(self.optimizer, self.group, self.group)
        there = None
        if self.saved is not None and same_class and not lines and self._values_that_differ():
            there = states_of_new(self.optimizer, self.group, _with_types(self.group, self.saved))
        structures: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for parameter, name in zip(self.group["params"], self.parameters, strict=True):
            found, expected = stored.get(name, {}), None if own is None else own[parameter]
            only_there, missing, shapes = self._states_differ(
                parameter, found, expected, None if there is None else there[parameter]
            )
            if only_there or missing:
                structures.setdefault((only_there, missing), []).append(name)
            lines += [f"state {key!r} of {name}: {problem}" for key, problem in shapes.items()]
            if missing or shapes or (expected is None and not same_class):
                fit.kept.add(parameter)
            elif found:
                self._add(parameter, {key: of for key, of in found.items() if key not in only_there}, fit)
            elif not same_class:
                fit.kept.add(parameter)
        for (only_there, missing), of in structures.items():
            lines.append(f"states of {_some(of)}: {_only('', only_there, missing)}{self._values_that_differ()}")
        if self.saved is not None and same_class and not structures:
            values = self.saved if not lines else {k: v for k, v in self.saved.items() if k in self.group}
            fit.groups.append((self.group, values))
        fit.differences += [f"{self._where()}: {line}" for line in lines]

    def _where(self) -> str:
        number = f", group {self.number}" if len(self.optimizer.param_groups) > 1 else ""
        return f"optimizer {self.name!r} ({self._kind()}){number}"

    def _kind(self) -> str:
        return _class_of(self.optimizer, self.number)

    def _groups_differ(self, others: Sequence[dict[str, Any]]) -> Iterator[str]:
        if self.saved is None:
            mine = set(self.parameters)
            groups = [_some(group["params"]) for group in others if mine.intersection(group["params"])]
            there = (
                f"the checkpoint has them in groups of {' and of '.join(groups)}"
                if groups
                else "the checkpoint does not"
            )
            yield f"has a group of {_some(self.parameters)}, {there}"
        elif self._kind() != (there := self.saved.get("class", self._kind())):
            yield f"class {there} in the checkpoint, {self._kind()} here"

    def _hyper_parameters_differ(self) -> Iterator[str]:
        if self.saved is None:
            return
        fused = isinstance(self.optimizer, FusedOptimizer)
        own = values_of(self.group if fused else self.optimizer.defaults).keys()
        saved = self.saved.keys() - ABOUT - IMPLEMENTATION
        missing, only_there = own - saved, saved - self.group.keys() - _OF_SCHEDULERS
        if missing or only_there:
            yield _only("hyper-parameters ", sorted(only_there), sorted(missing))

    def _values_that_differ(self) -> str:
        """The hyper-parameters that may be why states differ."""
        saved, own = self.saved or {}, values_of(self.group)
        differ = [
            f"{key} {_with_types(own, saved)[key]!r} in the checkpoint, {value!r} here"
            for key, value in own.items()
            if key in saved and _with_types(own, saved)[key] != value
        ]
        return f" ({'; '.join(differ)})" if differ else ""

    def _states_differ(
        self, parameter: nn.Parameter, found: Mapping[str, str], expected: States | None, there: States | None
    ) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        """The names of states that are only in the checkpoint, that are missing there, and what is wrong with shapes.

        Args:
            expected: of the optimizer here, if known.
            there: of an optimizer with the hyper-parameters of the checkpoint.
        """
        if expected is None:
            return (), (), {}
        have: Iterable[str] = found
        if not found and not expected.at_once:  # it was not updated yet: compare what it would get
            have = (there or expected).shapes
        need = expected.shapes
        shapes = {}
        for key in sorted(need.keys() & found.keys()):
            stored = self.manifest.tensors.get(found[key])
            shape = None if stored is None else stored.shape
            if shape != need[key] and not self._is_mean(parameter, key, shape):
                expected_shape = "no tensor" if need[key] is None else need[key]
                problem = f"{_shape(shape)} in the checkpoint, expected {expected_shape}"
                shapes[key] = problem + self._resize(parameter, shape)
        return tuple(sorted(set(have) - need.keys())), tuple(sorted(need.keys() - set(have))), shapes

    def _is_mean(self, parameter: nn.Parameter, key: str, shape: tuple[int, ...] | None) -> bool:
        """Whether a state of rows is stored for another number of shards of columns."""
        if not isinstance(self.optimizer, FusedOptimizer) or shape is None:
            return False
        of_rows = self.optimizer.kinds[self.number].of_rows
        return key in of_rows and is_of_other_columns(shape, tuple(self.optimizer.state[parameter][key].shape))

    def _resize(self, parameter: nn.Parameter, shape: tuple[int, ...] | None) -> str:
        fused = isinstance(self.optimizer, FusedOptimizer)
        return ". Fix: resize_ the collection first" if fused and shape and shape[0] != parameter.shape[0] else ""

    def _add(self, parameter: nn.Parameter, found: Mapping[str, str], fit: FittingState) -> None:
        """Have the states of a parameter loaded, into those that it has, else into new ones."""
        fit.entries[parameter] = dict(found)
        for key, name in found.items():
            existing, stored = self.optimizer.state.get(parameter, {}).get(key), self.manifest.tensors.get(name)
            if stored is not None and self._is_mean(parameter, key, stored.shape) and existing.shape != stored.shape:
                fit.means[name] = existing
                existing = room_for(stored, existing)
            elif stored is not None and not isinstance(existing, Tensor):
                existing = new_state(key, stored, parameter, self.group)
            fit.state[name] = existing


def _only(what: str, there: Sequence[str], missing: Sequence[str]) -> str:
    parts = [f"{what}{', '.join(there)} only in the checkpoint"] if there else []
    return "; ".join([*parts, *([f"{what}{', '.join(missing)} missing in the checkpoint"] if missing else [])])


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"shape {shape}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _with_types(group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved hyper-parameters with the tuples that JSON made lists of."""
    return {key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in saved.items()}


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in _with_types(group, saved).items():
        if key in IMPLEMENTATION | ABOUT:
            continue
        if isinstance(old := group.get(key), Tensor):
            with torch.no_grad():
                old.fill_(value)
        else:
            group[key] = value
