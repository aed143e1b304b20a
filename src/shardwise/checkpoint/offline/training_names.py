"""The module and the optimizers in training states of other programs, under the names of `state_of`.

    model_state_dict.0.weight                 model.0.weight
    optimizer_state_dict.state.0.exp_avg      optimizer.0.weight.exp_avg
    optimizer_state_dict.param_groups         optimizer.param_groups
    epoch                                     epoch

An optimizer is recognised by its `param_groups`, a module by its name.
Source: `Optimizer.state_dict` of torch/optim/optimizer.py; torch/distributed/checkpoint/state_dict.py.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from shardwise.checkpoint.differences import some
from shardwise.checkpoint.optimizers import are_groups
from shardwise.checkpoint.state import MODEL
from shardwise.errors import CheckpointError, did_you_mean

OPTIMIZER, GROUPS = "optimizer.", ".param_groups"
MODULES = ("model", "state_dict", "model_state_dict", "module", "net")  # programs' names for the state of a module
SHOWN = 5  # names of a list in an error

Groups: TypeAlias = list[dict[str, Any]]

KeyPath: TypeAlias = tuple[str | int, ...]
"""The path to a value in a nested state: keys of mappings and indices of lists."""


@dataclass(frozen=True)
class TrainingNames:
    """The positions of the module and the optimizers in a training state.

    Attributes:
        model: the prefix of the module's names, without the dot; "" if there is none; None: search it.
        optimizers: the prefix of each optimizer; None: search them.
        parameters: the names of parameters, for optimizers that number theirs: in the order of the numbers, one
            optimizer after the other.
    """

    model: str | None = None
    optimizers: Sequence[str] | None = None
    parameters: Sequence[str] | None = None


def renamed(
    tensors: Collection[str], values: Mapping[str, Any], paths: Mapping[str, KeyPath], given: TrainingNames
) -> tuple[dict[str, str], dict[str, Any]]:
    """The name of each tensor by its new name, and the values by their new names.

    Names that are neither of the module nor of an optimizer are kept.

    Args:
        tensors: their names.
        values: with the groups of an optimizer as one list.
        paths: where tensors and values were in the nested state, by name.
    """
    values = _with_groups(values, paths)
    there = [
        name.removesuffix(GROUPS) for name, of in values.items() if name.endswith(GROUPS) and of and are_groups(of)
    ]
    groups: dict[str, Groups] = {name: values[name + GROUPS] for name in _optimizers(there, given.optimizers)}
    new = {name: name for name in [*tensors, *values]}
    model = _model(tensors, paths, there, given.model)
    if model:
        new |= {name: MODEL + name.removeprefix(f"{model}.") for name in new if name.startswith(f"{model}.")}
    elif model is not None:
        new |= {name: MODEL + name for name in tensors if len(paths.get(name, ())) < 2}
    known = [name.removeprefix(MODEL) for name in new.values() if name.startswith(MODEL)]
    merged: Groups = []
    for optimizer, names in _parameters(groups, given.parameters, known).items():
        new |= _states(optimizer, groups[optimizer], names, new)
        del new[optimizer + GROUPS]
        left = iter(names)
        for group in groups[optimizer]:
            said = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            merged.append({"params": [next(left) for _ in group["params"]], "optimizer": optimizer, **said})
    _check_unique(new)
    found = {new[name]: value for name, value in values.items() if name in new}
    if groups:
        found[OPTIMIZER + GROUPS[1:]] = merged
    return {new[name]: name for name in tensors}, found


def check_shapes(names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], parameters: Sequence[str]) -> None:
    """Refuse an order of parameters if states are too large for them; smaller states may have a number a row.

    Args:
        names: the name of each tensor by its new name.
        shapes: by name.
        parameters: the names that were given to numbered parameters.
    """
    given = {one: number for number, one in enumerate(parameters) if MODEL + one in names}
    for new, name in names.items():
        owner = new.removeprefix(OPTIMIZER).rpartition(".")[0]
        if not new.startswith(OPTIMIZER) or owner not in given:
            continue
        state, shape = shapes[name], shapes[names[MODEL + owner]]
        same = [n for n in state if n != 1] == [n for n in shape if n != 1]
        if prod(state) > 1 and prod(state) >= prod(shape) and not same:
            alike = [one for one in given if shapes[names[MODEL + one]] == state]
            meant = f" Of that shape: {_some(alike)}." if alike else ""
            raise CheckpointError(
                f"{name!r} has shape {state}, and {owner!r}, which is parameters[{given[owner]}], {shape}.{meant} "
                f"Fix: {_how_to_name(())}"
            )


def _with_groups(values: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> dict[str, Any]:
    """`values` with lists of groups, which `flatten_optimizer_state_dict` of torch removes.

    torch stores hyper-parameters for each parameter: optimizer.param_groups.0.weight.lr. Parameters with equal
    hyper-parameters become a group; `restore` refuses groups that the optimizer does not have.
    """
    found = dict(values)
    of: dict[str, dict[str, dict[str, Any]]] = defaultdict(lambda: defaultdict(dict))
    for name, value in values.items():
        path = paths.get(name, ())
        if len(path) > 1 and isinstance(path[-1], str) and path[-1].startswith(f"{GROUPS[1:]}."):
            parameter, _, key = path[-1].removeprefix(f"{GROUPS[1:]}.").rpartition(".")
            of[name.removesuffix(f".{path[-1]}")][parameter][key] = value
            del found[name]
    for optimizer, parameters in of.items():
        groups: dict[str, dict[str, Any]] = {}
        for parameter, said in parameters.items():
            group = groups.setdefault(json.dumps(said, sort_keys=True), {"params": [], **said})
            group["params"].append(parameter)
        found[optimizer + GROUPS] = [*groups.values()]
    return found


def _optimizers(there: Sequence[str], given: Sequence[str] | None) -> Sequence[str]:
    """The optimizers to import."""
    if given is None:
        if len(there) > 1:
            raise CheckpointError(
                f"there are several optimizers: {_some(there)}. Fix: optimizers={[there[0]]!r} imports one of them, "
                f"optimizers={list(there)!r} all (--optimizer, once for each)"
            )
        return there
    for name in given:
        if name not in there:
            raise CheckpointError(
                f"there is no optimizer called {name!r}.{did_you_mean(name, there)} Fix: one that has param_groups: "
                f"{_some(there) or 'there is none'}"
            )
    return given


def _model(
    tensors: Collection[str], paths: Mapping[str, KeyPath], optimizers: Sequence[str], given: str | None
) -> str | None:
    """The prefix of the module's names; None if it is right already, or there is no module."""
    found = dict.fromkeys(
        name[: -len(str(path[-1])) - 1]
        for name in tensors
        if len(path := paths.get(name, ())) > 1
        and path[-2] in MODULES
        and not any(name.startswith(f"{optimizer}.") for optimizer in optimizers)
    )
    if given is not None:
        if given and not any(name.startswith(f"{given}.") for name in tensors):
            meant = did_you_mean(given, found)
            raise CheckpointError(
                f"there is nothing under {given!r}, which model names.{meant} Fix: what is before the names of the "
                f"module, as 'state_dict' is in 'state_dict.0.weight'; there are {_some(tensors)}"
            )
        return given
    if any(name.startswith(MODEL) for name in tensors):
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"there are several modules: {_some(found)}. Fix: model={next(iter(found))!r} names one of them (--model)"
        )
    return next(iter(found), None)


def _parameters(
    groups: Mapping[str, Groups], given: Sequence[str] | None, known: Collection[str]
) -> dict[str, list[str]]:
    """The names of each optimizer's parameters, in the order of its groups. `given` are for numbered ones."""
    found, left = dict[str, list[str]](), list(given or ())
    numbered = [name for name, of in groups.items() if _stored_names(of) is None]
    count = sum(len(group["params"]) for name in numbered for group in groups[name])
    if given is not None and len(given) != count:
        raise CheckpointError(
            f"parameters has {len(given)} names, and {count} parameters have numbers in place of names. "
            f"Fix: {_how_to_name(numbered) if count else 'leave parameters out'}"
        )
    if numbered and given is None:
        of_module = f"; the module has {_some(known)}" if known else ""
        raise CheckpointError(
            f"{numbered[0]!r} has numbers for its parameters, no names{of_module}. Fix: {_how_to_name(numbered)}"
        )
    for name, of in groups.items():
        size = sum(len(group["params"]) for group in of)
        if (stored := _stored_names(of)) is None:
            if (numbers := [number for group in of for number in group["params"]]) != [*range(size)]:
                raise CheckpointError(
                    f"{name!r} numbers its parameters {_some(numbers)}, expected 0, 1, … over all groups. "
                    f"Fix: save what the state_dict() of an optimizer of torch.optim returns"
                )
            found[name], left = left[:size], left[size:]
        else:
            found[name] = stored
    _check_names([name for names in found.values() for name in names], known)
    return found


def _how_to_name(optimizers: Sequence[str]) -> str:
    each = f"; first those of {optimizers[0]!r}, then those of {_some(optimizers[1:])}" if optimizers[1:] else ""
    return (
        "parameters=[name for name, _ in model.named_parameters()] if the optimizer was made of model.parameters(), "
        f"else the names in the order in which it got them{each} (--parameters FILE, with a name a line)"
    )


def _stored_names(groups: Groups) -> list[str] | None:
    """The names in the groups: torch has them from `get_state_dict`, or from `named_parameters`."""
    found: list[str] = []
    for group in groups:
        names = group["params"] if all(isinstance(one, str) for one in group["params"]) else group.get("param_names")
        if not isinstance(names, list) or [type(name) for name in names] != [str] * len(group["params"]):
            return None
        found += names
    return found


def _check_names(names: Sequence[str], known: Collection[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise CheckpointError(
            f"{repeated[0]!r} is the name of several parameters of the optimizers. "
            f"Fix: name each once; optimizers=[…] (--optimizer) imports one of several"
        )
    unknown = [name for name in names if name not in known] if known else []
    if unknown:
        raise CheckpointError(
            f"the module has no {unknown[0]!r}, which is a parameter of an optimizer.{did_you_mean(unknown[0], known)} "
            f"Fix: parameters=[…] has names of the module, and model=… says what is before them, as "
            f"'state_dict.model' is in 'state_dict.model.0.weight'"
        )


def _states(optimizer: str, groups: Groups, names: Sequence[str], there: Iterable[str]) -> dict[str, str]:
    """The new names of an optimizer's entries."""
    saved = [one for group in groups for one in group["params"]]
    owners = {f"state.{one}": name for one, name in zip(saved, names, strict=True)}
    owners |= {one: name for one, name in zip(saved, names, strict=True) if isinstance(one, str)}
    found = {}
    for full in there:
        if not full.startswith(f"{optimizer}.") or full == optimizer + GROUPS:
            continue
        owner, _, key = full.removeprefix(f"{optimizer}.").rpartition(".")
        if owner in owners:
            found[full] = f"{OPTIMIZER}{owners[owner]}.{key}"
        elif owner.startswith("state."):
            raise CheckpointError(
                f"{full!r} is a state, but its parameter is not in {optimizer + GROUPS!r}. "
                f"Fix: skip=[{full!r}] (--skip) leaves it out; a state is one tensor or number under its name"
            )
    return found


def _check_unique(new: Mapping[str, str]) -> None:
    old: dict[str, str] = {}
    for name, after in new.items():
        if after in old:
            raise CheckpointError(
                f"{old[after]!r} and {name!r} would both be called {after!r}. Fix: skip=[…] (--skip) leaves one out"
            )
        old[after] = name


def _some(names: Iterable[object]) -> str:
    return some([repr(name) for name in names], SHOWN)


def with_lists(values: Mapping[str, Any], paths: Mapping[str, KeyPath], tensors: Collection[str]) -> dict[str, Any]:
    """`values` with lists under their own names: "groups" in place of "groups.0.lr" and "groups.1.lr".

    A list that is not complete, or has tensors, stays divided; lists in it are joined.
    """
    lists: dict[KeyPath, list[tuple[KeyPath, str]]] = defaultdict(list)
    for name in [*values, *tensors]:
        path = paths.get(name, ())
        for depth in (at for at, part in enumerate(path) if at and isinstance(part, int)):
            lists[path[:depth]].append((path[depth:], name))
    found, taken = dict(values), {*values, *tensors}
    for prefix, members in sorted(lists.items(), key=lambda entry: len(entry[0])):
        own = ".".join(map(str, prefix))
        if own in taken or any(name not in found for _, name in members):
            continue
        try:
            nested = _nested([(path, values[name]) for path, name in members])
        except ValueError:
            continue
        for _, name in members:
            del found[name]
        found[own] = nested
        taken.add(own)
    return found


def _nested(members: Sequence[tuple[KeyPath, Any]]) -> object:
    """The list, mapping or value of these entries; ValueError if there is none."""
    if len(members) == 1 and not members[0][0]:
        return members[0][1]
    parts: dict[str | int, list[tuple[KeyPath, Any]]] = defaultdict(list)
    for path, value in members:
        if not path:
            raise ValueError("a value and what is in it")
        parts[path[0]].append((path[1:], value))
    kinds = {type(part) for part in parts}
    if kinds == {str}:
        return {part: _nested(inside) for part, inside in parts.items()}
    if kinds == {int} and parts.keys() == set(range(len(parts))):
        return [_nested(parts[place]) for place in range(len(parts))]
    raise ValueError("neither a mapping nor a list in full")
