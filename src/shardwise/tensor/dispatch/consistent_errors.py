"""Errors that depend on values are raised on every rank, also on ranks with empty shards.

Torch raises for a bad index, or an integer division by zero, when it reads elements. A rank with an empty shard reads
none: it would not raise, and would wait for the other ranks forever. Instead it checks the indices, if these are
replicated, or runs the op on one element. Changes of tensors that were saved for backward are in `version_checks.py`.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from shardwise import collectives
from shardwise.rules import OpRule
from shardwise.rules.local_context import has_specialized_version
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.rules.shapes import index
from shardwise.rules.shapes.index import IndexForm
from shardwise.tensor.dispatch.local_calls import ReadsLayouts, call_under_hooks
from shardwise.tensor.dispatch.resolve import Recipe, has_empty_shards
from shardwise.tensor.dispatch.version_checks import ChecksVersions
from shardwise.tensor.dtensor import DTensor


def with_consistent_errors(
    rule: OpRule, func: Op, recipe: Recipe, call: Callable[..., Any], key: tuple[Any, ...]
) -> Callable[..., Any]:
    """`call`, which raises on this rank the errors that `func`, or its backward, raises on any rank."""
    own = recipe.local_impl is not None and not has_specialized_version(recipe.local_impl)
    others = own or recipe.redistributed or any(map(has_empty_shards, recipe.layouts))
    if rule.index_form is not None or (rule.value_errors and has_empty_shards(recipe.layouts[0])):
        call = _ConsistentErrors(func, rule.index_form, recipe, call)
    return ChecksVersions(func, recipe, call, key) if others and not rule.view else call


class _ConsistentErrors(ReadsLayouts):
    __slots__ = ("call", "form", "func", "recipe")

    def __init__(self, func: Op, form: IndexForm | None, recipe: Recipe, call: Callable[..., Any]) -> None:
        self.func = func
        self.form = form
        self.recipe = recipe
        self.call = call

    def __call__(self, *args: object, **kwargs: object) -> Any:
        empty = not self.recipe.layouts[0].local_numel(collectives.rank())
        if empty or self.recipe.redistributed:  # then the indices may be sharded
            self._raise_if_others_do(args, kwargs)
        try:
            return call_under_hooks(self.call, args, kwargs, self.recipe.output is None)
        except (IndexError, RuntimeError):
            self._raise_if_others_do(args, kwargs)
            raise

    def _raise_if_others_do(self, args: Args, kwargs: Kwargs) -> None:
        """Raise the error that ranks with elements raise.

        Check the indices if all ranks hold them, else run the op on one element. Return if neither raises.
        """
        if self.form is not None:
            _raise_bad_indices(self.form, args, kwargs)
        else:
            self.func(*map(_stand_in, args), **{k: _stand_in(a) for k, a in kwargs.items()})


def _raise_bad_indices(form: IndexForm, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's error for an index out of bounds, if all indices are replicated."""
    x, *rest = args
    call, shape = form.call(x, rest, kwargs), x._layout.shape
    dims = call.index_dims if form.kind != "flat" else (len(shape),)
    if prod(shape) and all(type(i) is DTensor and i._layout.is_replicated for i in call.ids):
        for ids, dim in zip(call.ids, dims, strict=True):
            index.raise_bad_index(shape, index.flat_index(call, ids, (*shape, prod(shape))[dim], dim)[1])


def _stand_in(a: object) -> object:
    """A 0-d substitute for an operand: its value if that is replicated and has one element, else 1."""
    if type(a) is not DTensor:
        return a
    local: torch.Tensor = a.detach()
    known = a._layout.is_replicated and a.numel() == 1
    return local.reshape(()) if known else torch.ones((), dtype=local.dtype, device=local.device)
