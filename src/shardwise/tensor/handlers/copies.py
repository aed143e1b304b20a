"""Copies where torch gives views: a view of a sharded tensor that had to be redistributed shares no memory with it.

An in-place op on such a copy is refused, because the original would not change. An in-place op on the original outdates
its live copies: they hold old values, so every later use of one is an error. Both follow from storages, which all views
of a tensor share, and both happen on all ranks, also on those that sent nothing.
"""

import gc
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise.errors import RuleError
from shardwise.rules.row import Args, Kwargs
from shardwise.tensor.dtensor import DTensor

_storage_of: Any = torch._C.TensorBase.untyped_storage


class Copy:
    """One view that had to be moved; its storages keep it, and the storage of the original refers to it weakly."""

    __slots__ = ("__weakref__", "listed", "tensors")

    def __init__(self, tensors: Iterable[Tensor], listed: "list[WeakSet[Copy]]") -> None:
        self.tensors: list[ReferenceType[Tensor]] = [ref(x) for x in tensors]
        self.listed = listed  # where its original, and what that may be a copy of, list their copies
        for copies in listed:
            copies.add(self)


LIVING: WeakSet[Copy] = WeakSet()


class Outdated(DTensor):
    """What a moved view becomes when its original is changed in place."""

    @property
    def _layout(self) -> Any:  # type: ignore[override]
        return _refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return _refuse()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "DTensor(a moved view whose original was changed in place)"

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return _refuse()  # type: ignore[no-any-return]

    def detach(self) -> DTensor:
        return _refuse()  # type: ignore[no-any-return]


def _refuse() -> Any:
    raise RuleError(
        "This view had to be moved to be made, so it is a copy; its original was changed in place since, and it would "
        "show old values. Fix: make the view again after the change, or clone() it if the old values are meant."
    )


def marked(local: Tensor) -> Tensor:
    """`local`, as a copy where a view is expected: changing it in place is refused."""
    return _kept(local, Copy((), []))


def copied(out: Any, original: Tensor) -> Any:
    """What an op gives where torch gives views of `original`: copies on every rank, and known to be."""
    with DisableTorchFunctionSubclass():
        if original.is_sparse:
            return out
        storage = original.untyped_storage()

        def own(x: Tensor) -> Tensor:
            return x.clone() if _storage_of(x) is storage else x

        several = isinstance(out, list | tuple)
        outs = [own(x) for x in (out if several else [out])]
        known = vars(storage)
        copy = Copy(
            outs,
            [LIVING, known.setdefault("_copies", WeakSet()), *(known["_copy"].listed[1:] if "_copy" in known else ())],
        )
        for x in outs:
            _kept(x, copy)
        return type(out)(outs) if several else outs[0]


def _kept(x: Tensor, copy: Copy) -> Tensor:
    with DisableTorchFunctionSubclass():
        if not x.is_sparse:
            x.untyped_storage()._copy = copy  # type: ignore[attr-defined]  # views and detach() share it
    return x


def before_change(name: str, x: DTensor) -> Iterable[Copy]:
    """Ask this before `x` is changed in place, and `outdate` what it gives afterwards: the op may read those copies.

    Raises:
        RuleError: nothing of the original would change, for `x` is a view of a copy.
    """
    with DisableTorchFunctionSubclass():
        known = None if x.is_sparse else vars(x.untyped_storage())
    if not known:
        return ()
    if "_copy" in known:
        raise RuleError(
            f"{name} works in place on a view of {x._layout} that had to be moved to be made, so the original "
            f"would not change. Fix: change the original, or clone() the view if only that is to change."
        )
    return known.get("_copies", ())  # type: ignore[no-any-return]


def before_changes(name: str, tensors: Iterable[Any]) -> list[Copy]:
    """The same for many tensors, most of which are no views and have none."""
    with DisableTorchFunctionSubclass():
        changed = [x for x in tensors if type(x) is DTensor and (LIVING or x._is_view())]
    return [copy for x in changed for copy in before_change(name, x)]


def outdate(copies: Iterable[Copy]) -> None:
    """Turn the tensors of these copies, and views of them, into what refuses to be read."""
    with DisableTorchFunctionSubclass():
        for copy in list(copies):
            for listed in copy.listed:
                listed.discard(copy)
            for x in _tensors_of(copy):
                x.__class__ = Outdated


def _tensors_of(copy: Copy) -> Iterator[Tensor]:
    """Those that were made with the copy, and, where something else uses their storages, views of them."""
    made = [x for x in (known() for known in copy.tensors) if x is not None]
    users = len({id(y) for x in made for y in (x, x._base) if y is not None}) + len({id(_storage_of(x)) for x in made})
    if not made or sum(torch._C._storage_Use_Count(s._cdata) for s in {_storage_of(x) for x in made}) > users:
        yield from [x for x in gc.get_objects() if type(x) is DTensor and _is_of(x, copy)]
    else:
        yield from made


def _is_of(x: DTensor, copy: Copy) -> bool:
    return not x.is_sparse and getattr(x.untyped_storage(), "_copy", None) is copy
