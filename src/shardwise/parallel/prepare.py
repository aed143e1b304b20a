"""`PrepareModuleInput` and `PrepareModuleOutput`: redistribution of positional, keyword and nested arguments."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise._layout import Kind, Placement, checked_init, describe, placement_of
from shardwise._rules.row import Args, Kwargs
from shardwise.errors import PlanError, did_you_mean
from shardwise.parallel.boundary import BoundaryRedistribution
from shardwise.parallel.styles import (
    Arguments,
    InputFn,
    ModuleContext,
    ModuleInputs,
    OutputFn,
    ParallelStyle,
    PlacementsLike,
    forward_arguments,
)

NestedLayouts = PlacementsLike | None | Sequence[Any] | Mapping[str, Any]
"""Placements of one argument, None to leave it, or a tuple, list or dict of these for nested arguments.
Placements of an argument that is not a tensor apply to every tensor in it."""


def _may_be_nested_layouts(value: object) -> bool:
    """Accept anything: the argument of each layout is known only when the style is applied; see `_nested`."""
    if isinstance(value, Mapping):
        return all(map(_may_be_nested_layouts, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_may_be_nested_layouts, value))
    return value is None or placement_of(value) is not None


_NESTED = "placements of each argument, in nested lists, tuples or dicts"
describe(NestedLayouts, Kind(_NESTED, _may_be_nested_layouts, "such as (Shard(0), None)", PlanError))


@dataclass(frozen=True)
class _NestedRedistribution:
    """Redistributes an argument: a tensor, or the items of a sequence or mapping."""

    what: str
    tensor: BoundaryRedistribution | None
    items: "tuple[_NestedRedistribution | None, ...] | dict[str, _NestedRedistribution | None] | None" = None

    def __call__(self, x: object) -> Any:
        if x is None:  # an optional argument that was not passed
            return None
        if isinstance(x, Tensor) and self.tensor is not None:
            return self.tensor(x)
        if self.items is None:
            assert self.tensor is not None
            if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(x)):
                got = type(x).__name__
                raise PlanError(f"{self.what} has a layout, but is {got} without tensors. Fix: None for it.")
            return pytree.tree_map_only(Tensor, self.tensor, x)
        if isinstance(self.items, dict):
            if isinstance(x, Mapping) and all(key in x for key in self.items):
                out: Any = copy.copy(x)
                for key, item in self.items.items():
                    if item is not None:
                        out[key] = item(x[key])
                return out
        elif self.items is not None:
            if isinstance(x, Tensor) and len(self.items) == 1:
                return x if self.items[0] is None else self.items[0](x)
            if isinstance(x, tuple | list) and len(x) == len(self.items):
                out = [y if item is None else item(y) for item, y in zip(self.items, x, strict=True)]
                return type(x)._make(out) if hasattr(x, "_make") else type(x)(out)
        raise self._unfit(x)

    def _unfit(self, x: object) -> PlanError:
        got = f"is {type(x).__name__}{f' of {len(x)}' if isinstance(x, tuple | list) else ''}"
        if isinstance(x, Tensor | Mapping):
            got = "is one tensor" if isinstance(x, Tensor) else f"has the keys {', '.join(map(str, x))}"
        items = f"keys {', '.join(self.items)}" if isinstance(self.items, dict) else f"{len(self.items or ())} items"
        return PlanError(
            f"{self.what} {got}, the plan has layouts for {items}. Fix: one layout for each item or key that it has, "
            f"None to leave one unchanged; for a tensor one layout."
        )


def _nested(
    context: ModuleContext, plain: NestedLayouts, desired: NestedLayouts, use_local_output: bool, what: str
) -> _NestedRedistribution | None:
    """The redistribution of an argument; layouts of plain tensors and desired ones have the same structure."""
    if plain is None and desired is None:
        return None
    path = f"{what} of {context.path or 'the module'}"
    tensor = None
    if _fits_tensor(plain, context) and _fits_tensor(desired, context):
        layouts = cast(PlacementsLike | None, plain), cast(PlacementsLike | None, desired)
        tensor = context.redistribution(*layouts, use_local_output=use_local_output, what=what)
    if placement_of(plain) is not None or placement_of(desired) is not None:
        if tensor is None:
            raise PlanError(f"{what}: {plain!r} and {desired!r} differ in structure. Fix: write both the same way.")
        return _NestedRedistribution(path, tensor)
    like = desired if plain is None else plain
    keys = _keys(like, what)
    if any(side is not None and _keys(side, what) != keys for side in (plain, desired)):
        raise PlanError(
            f"{what}: layouts {plain!r} and desired layouts {desired!r} differ in number or names. "
            f"Fix: the same entries in both, None to leave one unchanged."
        )

    def item(key: Any) -> _NestedRedistribution | None:
        a, b = (None if side is None else cast(Any, side)[key] for side in (plain, desired))
        return _nested(context, a, b, use_local_output, f"{what}[{key!r}]")

    items: Any = {key: item(key) for key in keys} if isinstance(like, Mapping) else tuple(map(item, keys))
    return _NestedRedistribution(path, tensor, items)


def _keys(layouts: object, what: str) -> list[Any]:
    if isinstance(layouts, Mapping):
        return sorted(layouts, key=str)
    if isinstance(layouts, Sequence) and not isinstance(layouts, str):
        return list(range(len(layouts)))
    raise PlanError(f"{what}: {layouts!r} is not a layout. Fix: a placement, None, or a tuple, list or dict of them.")


def _fits_tensor(layouts: object, context: ModuleContext) -> bool:
    """Whether these may be the placements of one tensor."""
    if layouts is None or placement_of(layouts) is not None:
        return True
    if isinstance(layouts, Mapping):  # keys are axis names, or keys of an argument that is a dict
        return set(layouts) <= set(context.mesh.names or ()) and _all_placements(layouts.values())
    return isinstance(layouts, Sequence) and len(layouts) == context.mesh.ndim and _all_placements(layouts)


def _all_placements(layouts: Iterable[object]) -> bool:
    return all(placement_of(p) is not None for p in layouts)


def _as_tuple(layouts: NestedLayouts) -> NestedLayouts:
    return (layouts,) if isinstance(layouts, Placement) else layouts


@dataclass(frozen=True)
class _CountedInputs(ModuleInputs):
    """Refuses tensors beyond the positional arguments that the plan has layouts for."""

    count: int
    what: str

    def __call__(self, args: Args, kwargs: Kwargs) -> Arguments:
        if any(isinstance(x, Tensor) for x in args[max(self.count, len(self.by_position)) :]):
            raise PlanError(
                f"{self.what} is called with {len(args)} positional arguments, the plan has layouts for {self.count}. "
                f"Fix: one layout per argument, None to leave one unchanged."
            )
        return super().__call__(args, kwargs)


@checked_init
@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """Redistributes the arguments of a module.

    Args:
        input_layouts: how plain tensors among the positional arguments are laid out: one entry per argument, None to
            leave one unchanged. A single placement is for the only argument. The entry of a nested argument is a
            tuple, list or dict of entries, or one placement for every tensor in it. On meshes of several axes, an
            entry may be a tuple of one placement per axis, or a dict of placements by axis name.
        desired_input_layouts: what they are redistributed to, in the same structure. None keeps the layouts.
        input_kwarg_layouts: the same by name. An argument may be passed by position or by name, either way.
        desired_input_kwarg_layouts: the desired layouts by name.
        use_local_output: pass local tensors to forward.
    """

    input_layouts: NestedLayouts = None
    desired_input_layouts: NestedLayouts = None
    input_kwarg_layouts: Mapping[str, NestedLayouts] | None = None
    desired_input_kwarg_layouts: Mapping[str, NestedLayouts] | None = None
    use_local_output: bool = False

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        arguments, count = forward_arguments(module), None
        plain, desired = _as_tuple(self.input_layouts), _as_tuple(self.desired_input_layouts)
        inputs = _nested(context, plain, desired, self.use_local_output, "input")
        by_position: list[_NestedRedistribution | None] = []
        if inputs is not None:
            if not isinstance(inputs.items, tuple):
                raise PlanError("input_layouts are one entry per argument. Fix: input_kwarg_layouts for names.")
            by_position, count = list(inputs.items), len(inputs.items)
            if count > len(arguments.positional) and not arguments.has_var_positional:
                raise PlanError(
                    f"input_layouts are {count}, but forward takes {', '.join(arguments.positional)}. "
                    f"Fix: at most one for each of these."
                )
        by_name = dict(zip(arguments.positional, by_position, strict=False))
        plain_kwargs, desired_kwargs = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        for name in sorted({*plain_kwargs, *desired_kwargs}):
            if by_name.get(name) is not None:
                raise PlanError(f"the argument {name!r} has layouts by position and by name. Fix: one of them.")
            if name not in arguments.names and not arguments.has_var_keyword:
                meant, known = did_you_mean(name, arguments.names), ", ".join(arguments.names)
                fix = f"use one of {known}" if known else "leave it out"
                raise PlanError(f"forward has no argument {name!r}.{meant} Fix: {fix}.")
            layouts = plain_kwargs.get(name), desired_kwargs.get(name)
            by_name[name] = _nested(context, *layouts, self.use_local_output, f"argument {name!r}")
            if name in arguments.positional:
                position = arguments.positional.index(name)
                by_position += [None] * (position + 1 - len(by_position))
                by_position[position] = by_name[name]
        if count is None:
            return ModuleInputs(by_position, by_name)
        return _CountedInputs(by_position, by_name, count, context.path or "the module")


@checked_init
@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """Redistributes the output of a module.

    Args:
        output_layouts: how plain tensors of it are laid out: a placement, or one entry for each of several outputs,
            None to leave one unchanged; nested, and by key for dicts, as for `PrepareModuleInput`.
        desired_output_layouts: what they are redistributed to, in the same structure.
        use_local_output: return local tensors.
    """

    output_layouts: NestedLayouts
    desired_output_layouts: NestedLayouts
    use_local_output: bool = True

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn | None:
        plain, desired = _as_tuple(self.output_layouts), _as_tuple(self.desired_output_layouts)
        return _nested(context, plain, desired, self.use_local_output, "output")


@checked_init
@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput`, whose `use_local_output` is `use_local_input` here, and `PrepareModuleOutput`."""

    input_layouts: NestedLayouts = None
    desired_input_layouts: NestedLayouts = None
    input_kwarg_layouts: Mapping[str, NestedLayouts] | None = None
    desired_input_kwarg_layouts: Mapping[str, NestedLayouts] | None = None
    use_local_input: bool = False
    output_layouts: NestedLayouts
    desired_output_layouts: NestedLayouts
    use_local_output: bool = True

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        options = {field.name: getattr(self, field.name) for field in fields(PrepareModuleInput)}
        return PrepareModuleInput(**options | {"use_local_output": self.use_local_input}).input_fn(module, context)

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn | None:
        options = {field.name: getattr(self, field.name) for field in fields(PrepareModuleOutput)}
        return PrepareModuleOutput(**options).output_fn(module, context)
