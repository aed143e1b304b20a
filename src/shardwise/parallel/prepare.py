"""What goes into a module and what comes out, laid out as the module wants it: positional, keyword and nested."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.errors import PlanError
from shardwise.layout import Placement
from shardwise.parallel.boundary import Crossing
from shardwise.parallel.styles import After, Arguments, Before, ParallelStyle, Placed, Where, forward_of

Layouts = Placed | None | Sequence[Any] | Mapping[str, Any]
"""Of one argument: placements of a tensor, None to leave it, or a tuple, list or dict of the same for what is inside.
Placements for an argument that is no tensor speak of every tensor inside it."""


@dataclass(frozen=True)
class _Tree:
    """What becomes of an argument: of a tensor, and of the parts of what is no tensor."""

    what: str
    whole: Crossing | None
    parts: "tuple[_Tree | None, ...] | dict[str, _Tree | None] | None" = None

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if x is None:  # an optional argument that is left out
            return None
        if isinstance(self.parts, dict):
            return self._mapping(self.parts, x)
        if self.parts is not None:
            return self._sequence(self.parts, x)
        assert self.whole is not None
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(x)):
            raise PlanError(f"{self.what} has a layout, but is {type(x).__name__} without tensors. Fix: None for it.")
        return pytree.tree_map_only(Tensor, self.whole, x)

    def _tensor(self, x: Tensor) -> Tensor:
        if self.whole is not None:
            return self.whole(x)
        if isinstance(self.parts, tuple) and len(self.parts) == 1:
            return x if self.parts[0] is None else self.parts[0]._tensor(x)
        raise PlanError(f"{self.what} is one tensor, the plan has layouts for {self._told()}. Fix: one layout.")

    def _told(self) -> str:
        if isinstance(self.parts, dict):
            return f"keys {', '.join(self.parts)}"
        return f"{len(self.parts or ())} parts"

    def _sequence(self, parts: "tuple[_Tree | None, ...]", x: Any) -> Any:
        if not isinstance(x, tuple | list) or len(x) != len(parts):
            got = f"{type(x).__name__} of {len(x)}" if isinstance(x, tuple | list) else type(x).__name__
            raise PlanError(
                f"{self.what} is {got}, the plan has layouts for {self._told()}. "
                f"Fix: one layout a part, None for those that stay as they are."
            )
        found = [y if part is None else part(y) for part, y in zip(parts, x, strict=True)]
        return type(x)._make(found) if hasattr(x, "_make") else type(x)(found)

    def _mapping(self, parts: "dict[str, _Tree | None]", x: Any) -> Any:
        if not isinstance(x, Mapping) or any(key not in x for key in parts):
            got = f"has the keys {', '.join(map(str, x))}" if isinstance(x, Mapping) else f"is {type(x).__name__}"
            raise PlanError(f"{self.what} {got}, the plan has layouts for {self._told()}. Fix: name keys that it has.")
        found: Any = copy.copy(x)
        for key, part in parts.items():
            if part is not None:
                found[key] = part(x[key])
        return found


def _tree(where: Where, given: Layouts, wanted: Layouts, local: bool, what: str) -> _Tree | None:
    """From layouts as they are written; those that are given and those that are wanted have one structure."""
    if given is None and wanted is None:
        return None
    whole = None
    if _is_placed(given, where) and _is_placed(wanted, where):
        whole = where.crossing(cast(Placed | None, given), cast(Placed | None, wanted), local=local, what=what)
    if isinstance(given, Placement) or isinstance(wanted, Placement):
        if whole is None:
            raise PlanError(
                f"{what}: {given!r} and {wanted!r} are not layouts of the same thing. Fix: write both alike."
            )
        return _Tree(f"{what} of {where.path or 'the module'}", whole)
    like = wanted if given is None else given
    for other in (given, wanted):
        if other is not None and _keys(other, what) != _keys(like, what):
            raise PlanError(f"{what}: layouts {given!r} and desired layouts {wanted!r} differ in number or names.")

    def inner(key: Any) -> _Tree | None:
        a, b = (None if side is None else cast(Any, side)[key] for side in (given, wanted))
        return _tree(where, a, b, local, f"{what}[{key!r}]")

    keys = _keys(like, what)
    parts: Any = {key: inner(key) for key in keys} if isinstance(like, Mapping) else tuple(map(inner, keys))
    return _Tree(f"{what} of {where.path or 'the module'}", whole, parts)


def _keys(layouts: Any, what: str) -> list[Any]:
    if isinstance(layouts, Mapping):
        return sorted(layouts, key=str)
    if isinstance(layouts, Sequence) and not isinstance(layouts, str):
        return list(range(len(layouts)))
    raise PlanError(f"{what}: {layouts!r} is no layout. Fix: a placement, None, or a tuple, list or dict of them.")


def _is_placed(layouts: Any, where: Where) -> bool:
    """Whether they may be those of one tensor."""
    if layouts is None or isinstance(layouts, Placement):
        return True
    if isinstance(layouts, Mapping):  # by axis name, or by key of an argument that is a dict
        return set(layouts) <= set(where.mesh.names or ()) and _all_placements(layouts.values())
    return isinstance(layouts, Sequence) and len(layouts) == where.mesh.ndim and _all_placements(layouts)


def _all_placements(layouts: Iterable[object]) -> bool:
    return all(isinstance(p, Placement) for p in layouts)


def _listed(layouts: Any) -> Any:
    return (layouts,) if isinstance(layouts, Placement) else layouts


@dataclass(frozen=True)
class _Inputs:
    """What becomes of the arguments of a forward."""

    by_position: list[_Tree | None]
    by_name: dict[str, _Tree | None]
    told: int | None  # how many positional arguments the plan has layouts for, if it has any
    what: str

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        trees = self.by_position
        if self.told is not None and any(isinstance(x, Tensor) for x in args[max(self.told, len(trees)) :]):
            raise PlanError(
                f"{self.what} is called with {len(args)} positional arguments, the plan has layouts for {self.told}. "
                f"Fix: one layout for each, None for those that stay as they are."
            )
        found = [x if tree is None else tree(x) for tree, x in zip(trees, args, strict=False)]
        found += args[len(found) :]
        if not kwargs:
            return tuple(found), kwargs
        named = [(key, x, self.by_name.get(key)) for key, x in kwargs.items()]
        return tuple(found), {key: x if tree is None else tree(x) for key, x, tree in named}


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(ParallelStyle):
    """The arguments of a module are moved as it wants them.

    Args:
        input_layouts: how plain tensors among the positional arguments are laid out: one entry an argument, None for
            one that stays as it is. One placement alone is for the only argument. An entry for a nested argument is
            a tuple, list or dict of entries, or one placement for every tensor in it. On meshes of several axes, an
            entry may be a tuple of one placement per axis, or a dict of placements by axis name.
        desired_input_layouts: what they are moved to, written alike. None leaves them.
        input_kwarg_layouts: the same by name. An argument may be passed by position or by name, either way.
        desired_input_kwarg_layouts: the same, moved to.
        use_local_output: hand on this rank's parts as plain tensors.
    """

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Layouts] | None = None
    desired_input_kwarg_layouts: Mapping[str, Layouts] | None = None
    use_local_output: bool = False

    def before(self, module: nn.Module, where: Where) -> Before:
        forward, told = forward_of(module), None
        given, wanted = _listed(self.input_layouts), _listed(self.desired_input_layouts)
        tree = _tree(where, given, wanted, self.use_local_output, "input")
        by_position: list[_Tree | None] = []
        if tree is not None:
            if not isinstance(tree.parts, tuple):
                raise PlanError("input_layouts are one entry an argument. Fix: input_kwarg_layouts for names.")
            by_position, told = list(tree.parts), len(tree.parts)
            if told > len(forward.positional) and not forward.any_number:
                raise PlanError(f"input_layouts are {told}, but forward takes {', '.join(forward.positional)}.")
        by_name = dict(zip(forward.positional, by_position, strict=False))
        named, wanted_named = self.input_kwarg_layouts or {}, self.desired_input_kwarg_layouts or {}
        for name in sorted({*named, *wanted_named}):
            if by_name.get(name) is not None:
                raise PlanError(f"the argument {name!r} has layouts by position and by name. Fix: one of them.")
            if name not in forward.names and not forward.any_name:
                close = get_close_matches(name, forward.names, n=1) or forward.names
                raise PlanError(f"forward has no argument {name!r}. Did you mean {close[0]!r}?")
            one = _tree(where, named.get(name), wanted_named.get(name), self.use_local_output, f"argument {name!r}")
            by_name[name] = one
            if name in forward.positional:
                place = forward.positional.index(name)
                by_position += [None] * (place + 1 - len(by_position))
                by_position[place] = one
        return _Inputs(by_position, by_name, told, where.path or "the module")


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(ParallelStyle):
    """The result of a module is moved as those who use it want it.

    Args:
        output_layouts: how plain tensors of it are laid out: a placement, or one entry for each of several results,
            None for one that stays as it is; nested, and by key for dicts, as for `PrepareModuleInput`.
        desired_output_layouts: what they are moved to, written alike.
        use_local_output: hand on this rank's parts as plain tensors.
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def after(self, module: nn.Module, where: Where) -> After | None:
        given, wanted = _listed(self.output_layouts), _listed(self.desired_output_layouts)
        return _tree(where, given, wanted, self.use_local_output, "output")


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one; `use_local_input` is what the former calls its output."""

    input_layouts: Layouts = None
    desired_input_layouts: Layouts = None
    input_kwarg_layouts: Mapping[str, Layouts] | None = None
    desired_input_kwarg_layouts: Mapping[str, Layouts] | None = None
    use_local_input: bool = False
    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def before(self, module: nn.Module, where: Where) -> Before:
        return PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        ).before(module, where)

    def after(self, module: nn.Module, where: Where) -> After | None:
        return PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        ).after(module, where)
