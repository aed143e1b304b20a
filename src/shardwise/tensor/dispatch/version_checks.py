"""Backward raises on every rank if a tensor that torch saves for it was changed in place.

    y = x.exp()    # torch saves y, and notes its version
    y.add_(1)      # another version
    y.backward()   # an error

Torch checks the tensors that a rank's own ops saved. A rank saves others where an operand was redistributed, its shard
is empty, or it is outside the mesh: there `check_versions` adds the checks that torch makes for the global tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise import collectives
from shardwise.layout import remember
from shardwise.rules.row import Args, Kwargs, Op
from shardwise.tensor.dispatch.autocasting import Autocast
from shardwise.tensor.dispatch.keys import NO_KEY
from shardwise.tensor.dispatch.local_calls import ReadsLayouts, call_under_hooks
from shardwise.tensor.dispatch.modes import without_modes
from shardwise.tensor.dispatch.names import name_of
from shardwise.tensor.dispatch.resolve import Recipe, with_meta_device
from shardwise.tensor.dtensor import DTensor

_saved_cache: dict[Any, frozenset[int]] = {}
# Indices of what an op saves: of its DTensor operands from 0 up, of its results from -1 down.
STALE = 1 << 30  # among them: the op itself changed something after it had saved it, so its backward always raises


class Version(NamedTuple):
    """Of a tensor that an op saves.

    Attributes:
        counter: see `counter_of`.
        version: when it was saved.
        shape: of the local tensor.
    """

    counter: Tensor
    version: int
    shape: tuple[int, ...]

    def check(self, name: Op) -> None:
        """Raise if the tensor was changed since."""
        if self.counter._version != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a DTensor with local shape {self.shape} that {name_of(name)} saved is at version "
                f"{self.counter._version}; expected version {self.version} instead. Fix: change a clone() of it."
            )


def on_meta(args: Args, kwargs: Kwargs, device: str) -> tuple[Args, Kwargs, list[Tensor]]:
    """The arguments with global tensors without memory for DTensors, and these tensors."""
    metas: list[Tensor] = []

    def meta(x: object) -> object:
        if type(x) is not DTensor:
            return on_device(x, device)
        metas.append(new_meta(x._layout.shape, x._layout.strides, x.dtype, x.requires_grad, device))
        return metas[-1]

    args, kwargs = pytree.tree_map(meta, (args, with_meta_device(kwargs)))
    return args, kwargs, metas


def on_device(x: object, device: str) -> object:
    """A plain tensor for calls without memory; calls with fake tensors take it as it is."""
    return x.to("meta") if isinstance(x, Tensor) and device == "meta" else x


def new_meta(
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    requires_grad: bool,
    device: str = "meta",
) -> Tensor:
    """A tensor for calls without memory; not a leaf, which no op may change in place."""
    with torch.enable_grad():
        if strides is None:
            leaf = torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)
            return leaf.view_as(leaf).clone()
        length = 1 + sum(max(n - 1, 0) * stride for n, stride in zip(shape, strides, strict=True))
        memory = torch.empty(length, dtype=dtype, device=device, requires_grad=requires_grad)
        return memory.clone().as_strided(shape, strides)


@contextmanager
def recording_saved(metas: Sequence[Tensor]) -> Iterator[Callable[[object], frozenset[int]]]:
    """Record what ops inside save for backward.

    Yields a function from the results of the op to the indices among `metas` of what it saved, and ~i for result i.
    """
    saved: list[tuple[Tensor, int]] = []
    before = [x._version for x in metas]

    def pack(x: Tensor) -> Tensor:
        saved.append((x, x._version))
        return x

    def found(out: object) -> frozenset[int]:
        results = tensors_in(out)
        known = [(i, x, version) for i, (x, version) in enumerate(zip(metas, before, strict=True))]
        known += [(~i, x, x._version) for i, x in enumerate(results)]
        stale = [STALE for x, version in saved if x._version != version]
        named = [i for i, x, now in known if any(now == then and _share_version(x, y) for y, then in saved)]
        return frozenset(named + stale)

    with saved_tensors_hooks(pack, lambda x: x):
        yield found


def _share_version(x: Tensor, y: Tensor) -> bool:
    before = y._version
    with _unsafe_preserve_version_counter((x,)):  # a view with another version would get another node of the graph
        increment_version(x)
        return y._version != before


def saved_by(func: Op, args: Args, kwargs: Kwargs, autocast: Autocast) -> frozenset[int]:
    """Which DTensors among the arguments torch saves for backward, by their number; ~i for result i.

    Found by running the op without memory; nothing for an op that cannot.
    """
    with without_modes(), autocast.without_memory() as device, torch.enable_grad():
        args, kwargs, metas = on_meta(args, kwargs, device)
        try:
            with recording_saved(metas) as found:
                return found(func(*args, **kwargs))
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):  # its own error, or no meta version
            return frozenset()


def versions_of(saved: frozenset[int], operands: Sequence[Tensor]) -> list[Version]:
    """The versions of the operands that an op saves; called before the op if it works in place."""
    return [_version(x) for i, x in enumerate(operands) if i in saved and not (x.is_sparse or x.is_inference())]


def _version(x: Tensor) -> Version:
    return Version(counter_of(x), x._version, tuple(x.shape))


def counter_of(x: Tensor) -> Tensor:
    """A tensor that has the version of `x` at all times, but not its memory."""
    counter = x.detach()
    counter.data = x.new_empty(0)
    return counter


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
        in_place = self.recipe.output is None
        if not torch.is_grad_enabled() or top_hooks(True) is not None:  # torch checks no versions of what hooks keep
            return call_under_hooks(self.call, args, kwargs, in_place)
        operands = [x for x in tensors_in([*args, *kwargs.values()]) if type(x) is DTensor]
        needs = tuple([x.requires_grad for x in operands])
        saved = self._watched(needs, args, kwargs) if any(needs) else frozenset()
        versions = versions_of(saved, operands) if in_place else []
        out = call_under_hooks(self.call, args, kwargs, in_place)
        if not in_place:  # which may change running statistics without torch's notice
            versions = versions_of(saved, operands)
        check_versions(self.func, args[0] if in_place and not self.recipe.rows else out, saved, versions)
        return out

    def _watched(self, needs: tuple[bool, ...], args: Args, kwargs: Kwargs) -> frozenset[int]:
        """What torch saves and this rank may not save."""
        saved = self._saved(needs, args, kwargs)
        recipe, rank = self.recipe, collectives.rank()
        if recipe.local_impl is None and all(layout.local_numel(rank) for layout in recipe.layouts):
            return saved & {i for i, _ in recipe.redistributed}
        return saved

    def _saved(self, needs: tuple[bool, ...], args: Args, kwargs: Kwargs) -> frozenset[int]:
        autocast = Autocast.of(self.recipe.layouts[0].mesh.device_type)
        key = self.key, needs, autocast
        found = _saved_cache.get(key)
        if found is None:
            found = saved_by(self.func, args, kwargs, autocast)
            if NO_KEY not in self.key:
                remember(_saved_cache, key, found)
        return found


def check_versions(name: Op, out: object, saved: frozenset[int], versions: Sequence[Version]) -> None:
    """Let the backward of an op, whose results are `out`, raise if something it saved was changed after that.

    `versions` are those of the operands that it saved.
    """
    results = tensors_in(out)
    versions = [*versions, *versions_of(frozenset(~i for i in saved if i < 0), results)]
    stale = STALE in saved
    if not versions and not stale:
        return
    nodes = {x.grad_fn for x in results if x.grad_fn is not None}

    def check(grads: object) -> None:
        for version in versions:
            version.check(name)
        if stale:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name_of(name)} changes a tensor that it saves, in torch too. Fix: use other ops."
            )

    for node in nodes:
        node.register_prehook(check)
