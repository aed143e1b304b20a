"""Copies where torch gives views: a view of a sharded tensor that needed a redistribution shares no memory with it.

    v = x[1]    # x is sharded along dim 0: every rank gets a copy of the row
    v.add_(1)   # an error: x would not change
    x.add_(1)   # invalidates v, v[0] and v.detach(), which have the old values
    v.sum()     # an error

All ranks raise both errors, also those that sent nothing. All views of a tensor share its storage, so the storage marks
a tensor as such a copy.
"""

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor.dtensor import DTensor, name_of
from shardwise.errors import RuleError

T = TypeVar("T")
_is_alias: Callable[[Tensor, Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
storage_of: Callable[[Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage

OVERWRITES = ("fill_", "zero_")  # give elements that share memory one value


class Copy:
    """The memory of one redistributed view. Its storage refers to it; the storage of the original does so weakly."""

    __slots__ = ("__weakref__", "registered_in", "tensors")

    def __init__(self, registered_in: "list[WeakSet[Copy]]") -> None:
        self.tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # all that use the memory, by id
        self.registered_in = registered_in  # the copies of its original, and of what that may be a copy of
        for copies in registered_in:
            copies.add(self)

    def add(self, x: Tensor) -> None:
        """Invalidate `x`, which uses this memory, and results of torch functions on `x`, with it."""
        if not x.is_sparse:
            storage_of(x)._copy = self  # type: ignore[attr-defined]
            self.tensors[id(x)] = x
            x.__torch_function__ = _dispatch_and_track  # type: ignore[method-assign]


LIVING: WeakSet[Copy] = WeakSet()


def _dispatch_and_track(func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    """`DTensor.__torch_function__` of a copy alone, so that other tensors do not pay for finding its views."""
    return track(DTensor._dispatch(func, args, kwargs or {}))


def track(out: T) -> T:
    """Track `out`, a tensor or several: tensors in the memory of a copy are invalidated with it."""
    with DisableTorchFunctionSubclass():
        for x in out if isinstance(out, list | tuple) else [out]:
            if type(x) is DTensor and not x.is_sparse:
                copy: Copy | None = vars(storage_of(x)).get("_copy")
                if copy is not None:
                    copy.add(x)
    return out


class InvalidatedView(DTensor):
    """A redistributed view after an in-place change of its original: every use is an error."""

    @property
    def _layout(self) -> NoReturn:  # type: ignore[override]
        _raise_invalidated()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> NoReturn:
        _raise_invalidated()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "DTensor(a copy where torch gives a view; the original was changed in place afterwards)"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _raise_invalidated()

    def detach(self) -> NoReturn:
        _raise_invalidated()


def _raise_invalidated() -> NoReturn:
    raise RuleError(
        "This view of a sharded tensor needed a redistribution, so it is a copy. The original was changed in place "
        "afterwards, and the copy has the old values. Fix: make the view again after the change, or clone() it if the "
        "old values are meant."
    )


def mark_copy(local: Tensor) -> Tensor:
    """`local`, marked as a copy where torch gives a view: it cannot be changed in place, but nothing invalidates it."""
    with DisableTorchFunctionSubclass():
        storage_of(local)._copy = Copy([])  # type: ignore[attr-defined]
    return local


def copies_of(original: Tensor, out: Any) -> Any:
    """The result of an op where torch gives views of `original`: copies of it, on every rank."""
    with DisableTorchFunctionSubclass():
        if original.is_sparse:
            return out
        storage = storage_of(original)
        known = vars(storage)
        outer: list[WeakSet[Copy]] = known["_copy"].registered_in[1:] if "_copy" in known else []
        copy = Copy([LIVING, known.setdefault("_copies", WeakSet()), *outer])
        several = isinstance(out, list | tuple)
        outs = [x.clone() if storage_of(x) is storage else x for x in (out if several else [out])]
        for x in outs:
            copy.add(x)
        return type(out)(outs) if several else outs[0]


def is_copy(x: Tensor) -> bool:
    """Whether `x` is a copy where torch gives a view; called with `__torch_function__` disabled."""
    return not x.is_sparse and "_copy" in vars(storage_of(x))


def before_change(name: str, x: DTensor) -> Iterable[Copy]:
    """Call this before `x` is changed in place. `invalidate` the result afterwards: the op may read these copies.

    Raises:
        RuleError: `x` is a copy, or a view of one, so the original would not change; or its elements share memory.
    """
    if x._layout.strides is not None and x._layout.overlaps and name.partition(".")[0] not in OVERWRITES:
        raise RuleError(
            f"{name} works in place on a tensor as {x._layout}, some elements of which share one memory location, as "
            f"those of an expanded or unfolded tensor do. Fix: clone() it first."
        )
    with DisableTorchFunctionSubclass():
        known = None if x.is_sparse else vars(storage_of(x))
    if not known:
        return ()
    if "_copy" in known:
        raise RuleError(
            f"{name} works in place on a view as {x._layout} that needed a redistribution, so it is a copy and the "
            f"original would not change. Fix: change the original, or clone() the view if only that is to change."
        )
    return known.get("_copies", ())  # type: ignore[no-any-return]


def before_op(func: Op, args: tuple[Any, ...]) -> tuple[Iterable[Copy], tuple[Any, ...]]:
    """`before_change` of an in-place op's first argument; and the arguments, with copies of those that share its
    memory.

    Torch raises for some of these, by the strides of local shards, so not on all ranks. A recipe does not decide this:
    it depends on the tensors.
    """
    first = args[0]
    with DisableTorchFunctionSubclass():
        usual = first._layout.strides is None and not first.is_sparse and not vars(storage_of(first))
    copies = () if usual else before_change(name_of(func), first)
    shared = [id(a) for a in args if a is not first and type(a) is DTensor and _is_alias(first, a)]
    # A copy would hide from backward that the operand is changed.
    if shared and not (torch.is_grad_enabled() and any(a.requires_grad for a in args if type(a) is DTensor)):
        args = tuple(a.clone() if id(a) in shared else a for a in args)
    return copies, args


def copies_of_memory(x: DTensor) -> Iterable[Copy]:
    """The copies of `x` and of its views."""
    with DisableTorchFunctionSubclass():
        found: Iterable[Copy] = vars(storage_of(x)).get("_copies", ())
        return found


def before_changes(name: str, tensors: Iterable[object]) -> list[Copy]:
    """Copies for many tensors, most of which are not views and have none."""
    with DisableTorchFunctionSubclass():
        changed = [x for x in tensors if type(x) is DTensor and (LIVING or x._is_view())]
    return [copy for x in changed for copy in before_change(name, x)]


def invalidate(copies: Iterable[Copy]) -> None:
    """Make every later use of these copies raise."""
    for copy in list(copies):
        for registered in copy.registered_in:
            registered.discard(copy)
        for x in copy.tensors.values():
            del x.__torch_function__
            x.__class__ = InvalidatedView
