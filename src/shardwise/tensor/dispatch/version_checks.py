"""Backward raises on every rank if a tensor that torch saves for it was changed in place.

    y = x.exp()    # torch saves y, and notes its version
    y.add_(1)      # another version
    y.backward()   # an error

Torch checks the tensors that a rank's own ops saved. A rank saves others where an operand was redistributed, its shard
is empty, or it is outside the mesh: there `check_versions` adds the checks that torch makes for the global tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.keys import NO_KEY
from shardwise.tensor.dispatch.local_calls import ReadsLayouts, call_under_hooks
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.recipes import remember
from shardwise.tensor.dispatch.resolve import Recipe, global_on_meta
from shardwise.tensor.dtensor import DTensor

_saved_cache: dict[Any, frozenset[int]] = {}
# Indices of what an op saves: of its DTensor operands from 0 up, of its results from -1 down.


def on_meta(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, list[Tensor]]:
    """The arguments with global tensors of torch's meta device for DTensors, and these tensors."""
    metas: list[Tensor] = []

    def meta(x: object) -> object:
        if type(x) is not DTensor:
            return x.to("meta") if isinstance(x, Tensor) else x
        with torch.enable_grad():
            like = global_on_meta(x._layout, x.dtype)
            leaf = torch.empty(x._layout.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
            copy = leaf.view_as(leaf).clone()  # not a leaf, which no op may change in place
            metas.append(copy if x._layout.strides is None else copy.as_strided(like.shape, like.stride()))
        return metas[-1]

    args, kwargs = pytree.tree_map(meta, (args, kwargs))
    return args, kwargs, metas


@contextmanager
def recording_saved(metas: Sequence[Tensor]) -> Iterator[Callable[[object], frozenset[int]]]:
    """Record what ops inside save for backward.

    Yields a function from the results of the op to the indices among `metas` of what it saved, and ~i for result i.
    """
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    def found(out: object) -> frozenset[int]:
        results = tensors_in(out)
        return frozenset(
            index
            for index, x in [*enumerate(metas), *((~i, x) for i, x in enumerate(results))]
            if any(_share_version(x, y) for y in saved)
        )

    with saved_tensors_hooks(pack, lambda x: x):
        yield found


def _share_version(x: Tensor, y: Tensor) -> bool:
    before = y._version
    increment_version(x)
    return y._version != before


def saved_by(func: Op, args: Args, kwargs: Kwargs) -> frozenset[int]:
    """Which DTensors among the arguments torch saves for backward, by their number; ~i for result i.

    Found by running the op on torch's meta device; nothing for an op that cannot.
    """
    args, kwargs, metas = on_meta(args, kwargs)
    with torch.enable_grad(), recording_saved(metas) as found:
        try:
            return found(func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError):  # the op raises its own error, or has no meta version
            return frozenset()


def watched_of(saved: frozenset[int], operands: Sequence[Tensor], out: object) -> list[Tensor]:
    """The tensors among operands and results that an op saved."""
    return [x for i, x in enumerate(operands) if i in saved] + [x for i, x in enumerate(tensors_in(out)) if ~i in saved]


def tensors_in(values: object) -> list[Tensor]:
    """A tensor, or the tensors in lists and tuples."""
    if isinstance(values, Tensor):
        return [values]
    return [y for x in values for y in tensors_in(x)] if isinstance(values, list | tuple) else []


class ChecksVersions(ReadsLayouts):
    """A call on ranks some of which may save other tensors than torch does."""

    __slots__ = ("call", "func", "key", "recipe")

    def __init__(self, func: Op, recipe: Recipe, call: Callable[..., Any], key: tuple[Any, ...]) -> None:
        self.func = func
        self.recipe = recipe
        self.call = call
        self.key = key

    def __call__(self, *args: object, **kwargs: object) -> object:
        out = call_under_hooks(self.call, args, kwargs, self.recipe.output is None)
        if torch.is_grad_enabled() and top_hooks(True) is None:  # torch checks no versions of what hooks keep
            self._check(args[0] if self.recipe.output is None and not self.recipe.rows else out, args, kwargs)
        return out

    def _check(self, out: object, args: Args, kwargs: Kwargs) -> None:
        operands = [x for x in tensors_in([*args, *kwargs.values()]) if type(x) is DTensor]
        needs = tuple([x.requires_grad for x in operands])
        if not any(needs):
            return
        saved = self._saved(needs, args, kwargs)
        recipe, rank = self.recipe, collectives.rank()
        empty = [not layout.local_numel(rank) for layout in recipe.layouts]
        if recipe.local_impl is None and not any(empty):
            copied = {i for i, _ in recipe.redistributed}
            saved = saved & copied
        check_versions(self.func, out, watched_of(saved, operands, out))

    def _saved(self, needs: tuple[bool, ...], args: Args, kwargs: Kwargs) -> frozenset[int]:
        key = self.key, needs
        found = _saved_cache.get(key)
        if found is None:
            found = saved_by(self.func, args, kwargs)
            if NO_KEY not in self.key:
                remember(_saved_cache, key, found)
        return found


def check_versions(name: Op, out: object, watched: Sequence[Tensor]) -> None:
    """Let the backward of an op, whose results are `out`, raise if one of `watched` was changed after the op."""
    counters = [(_counter(x), tuple(x.shape)) for x in watched if not (x.is_sparse or x.is_inference())]
    nodes = {x.grad_fn for x in tensors_in(out) if x.grad_fn is not None}
    if not counters:
        return
    versions = [(counter, counter._version, shape) for counter, shape in counters]

    def check(grads: object) -> None:
        for counter, version, shape in versions:
            if counter._version != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a DTensor with local shape {shape} that {name_of(name)} saved is at version {counter._version}; "
                    f"expected version {version} instead. Fix: change a clone() of it."
                )

    for node in nodes:
        node.register_prehook(check)


def _counter(x: Tensor) -> Tensor:
    """A tensor without memory that has the version of `x` at all times."""
    counter = x.detach()
    counter.data = x.new_empty(0)
    return counter
