"""Errors that not every rank would raise by itself are raised on every rank.

Values: torch raises for a bad index, or an integer division by zero, when it reads elements. A rank with an empty shard
reads none: it would not raise, and would wait for other ranks forever. So it checks the indices, if these are
replicated, or runs the op on one element.

Versions: backward raises if a tensor that torch saves for it was changed in place.

    y = x.exp()    # torch saves y, and notes its version
    y.add_(1)      # another version
    y.backward()   # an error

Torch checks the tensors that a rank's ops saved. A rank saves others if an operand was redistributed, its shard is
empty, or it is outside the mesh: then `check_versions` adds torch's checks of the global tensors.

Dtypes: torch's kernels raise for some, as in `"median_cpu" not implemented for 'Bool'`. A rank outside the mesh runs no
kernel on the operands, and tries the op on tensors of size 1.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version, saved_tensors_hooks
from torch.utils import _pytree as pytree

from shardwise._layout import REPLICATE
from shardwise._rules import Meta
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._rules.shapes import index
from shardwise._rules.shapes.index import IndexForm
from shardwise._tensor.dispatch.without_memory import Autocast, on_meta, unobserved, without_modes
from shardwise._tensor.dtensor import DTensor, name_of

# ---- values -----------------------------------------------------------------------------------------------------


def raise_if_others_do(func: Op, form: IndexForm | None, args: Args, kwargs: Kwargs) -> None:
    """Raise the error that ranks with elements raise.

    Check the indices if the op has any and all ranks hold them, else run the op on one element. Return if neither
    raises.
    """
    if form is not None:
        _raise_bad_indices(form, args, kwargs)
    else:
        func(*map(_stand_in, args), **{k: _stand_in(a) for k, a in kwargs.items()})


def _raise_bad_indices(form: IndexForm, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's error for an index out of bounds, if all indices are replicated."""
    x, *rest = args
    shape = x._layout.shape
    call: Any = form.call(Meta(shape, x.dtype, REPLICATE), rest, kwargs)  # a local tensor of several boxes has one dim
    dims = call.index_dims if form.indexing != "flat" else (len(shape),)
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


# ---- versions ---------------------------------------------------------------------------------------------------

_NO_DERIVATIVE = re.compile("not differentiable with respect to|derivative for")  # torch's errors

# Indices of what an op saves: of its DTensor operands from 0 up, of its results from -1 down.
STALE = 1 << 30  # among them: the op itself changed something after it had saved it, so its backward always raises


class Version(NamedTuple):
    """The version of a tensor when an op saved it.

    Attributes:
        counter: a tensor that shares the version of the saved one, but not its memory.
        shape: of the global tensor.
    """

    counter: Tensor
    version: int
    shape: tuple[int, ...]


class OnMeta(NamedTuple):
    """A call without memory.

    Attributes:
        operands: the global tensors for its DTensors.
        saved: the indices of tensors that torch saves for backward, ~i for result i.
    """

    operands: list[Tensor]
    results: Any
    saved: frozenset[int]


def run_on_meta(func: Op, args: Args, kwargs: Kwargs, autocast: Autocast, in_place: bool = False) -> OnMeta:
    """Run a call without memory. A call in place returns its first operand."""
    saved: list[tuple[Tensor, int]] = []

    def pack(x: Tensor) -> Tensor:
        saved.append((x, x._version))
        return x

    with without_modes(), autocast.without_memory() as device:
        args, kwargs, metas = on_meta(args, kwargs, device)
        before = [x._version for x in metas]
        with saved_tensors_hooks(pack, lambda x: x):
            out = func(*args, **kwargs)
        out = metas[0] if in_place else out
        known = [(i, x, version) for i, (x, version) in enumerate(zip(metas, before, strict=True))]
        known += [(~i, x, x._version) for i, x in enumerate(tensors_in(out))]
        stale = [STALE for x, version in saved if x._version != version]
        named = [i for i, x, now in known if any(now == then and _share_version(x, y) for y, then in saved)]
        return OnMeta(metas, out, frozenset(named + stale))


def _share_version(x: Tensor, y: Tensor) -> bool:
    before = y._version
    with _unsafe_preserve_version_counter((x,)):  # a view with another version would get another node of the graph
        increment_version(x)
        return y._version != before


def saved_by(func: Op, args: Args, kwargs: Kwargs, autocast: Autocast) -> frozenset[int]:
    """The indices of DTensor arguments that torch saves for backward; ~i for result i.

    Found by running the op without memory; empty for an op that cannot run so.

    Raises:
        RuntimeError: torch has no derivative with respect to an operand that requires grad.
    """
    try:
        with torch.enable_grad():
            return run_on_meta(func, args, kwargs, autocast).saved
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        if _NO_DERIVATIVE.search(str(error)):  # local implementations may have one
            raise
        return frozenset()  # its own error, or no meta version


def versions_of(saved: frozenset[int], operands: Sequence[Tensor]) -> list[Version]:
    """The versions of the operands that an op saves; called before the op if it works in place."""
    found: list[Version] = []
    for i, x in enumerate(operands):
        if i in saved and not (x.is_sparse or x.is_inference()):
            counter = x.detach()
            counter.data = x.new_empty(0)
            found.append(Version(counter, x._version, x._layout.shape if type(x) is DTensor else tuple(x.shape)))
    return found


def tensors_in(values: object) -> list[Tensor]:
    """A tensor, or the tensors in lists and tuples."""
    if isinstance(values, Tensor):
        return [values]
    return [y for x in values for y in tensors_in(x)] if isinstance(values, list | tuple) else []


def check_versions(name: Op, out: object, saved: frozenset[int], versions: Sequence[Version]) -> None:
    """Make the backward of an op with results `out` raise if a saved tensor changes later.

    `versions` are those of the saved operands. Torch checks no versions of tensors kept by saved-tensor hooks.
    """
    if not torch.is_grad_enabled() or top_hooks(True) is not None:
        return
    results = tensors_in(out)
    versions = [*versions, *versions_of(frozenset(~i for i in saved if i < 0), results)]
    stale = STALE in saved
    if not versions and not stale:
        return
    nodes = {x.grad_fn for x in results if x.grad_fn is not None}

    def check(grads: object) -> None:
        for counter, version, shape in versions:
            if counter._version != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a DTensor of shape {shape} that {name_of(name)} saved is at version "
                    f"{counter._version}; expected version {version} instead. Fix: change a clone() of it."
                )
        if stale:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{name_of(name)} changes a tensor that it saves, in torch too. Fix: use other ops."
            )

    for node in nodes:
        node.register_prehook(check)


# ---- dtypes -----------------------------------------------------------------------------------------------------

_FLOATS = (torch.float32, torch.float64)  # all kernels take these

_LIMIT = re.compile(r"not implemented for|not support|support bool|only support")

_checked: set[Any] = set()  # functions with dtypes that their kernels take


def raise_dtype_error(func: Op, args: Args, kwargs: Kwargs) -> None:
    """Raise torch's error if its kernels do not take the dtypes of these DTensors.

    Found once for each function and dtypes, by a run on tensors whose sizes are 1.
    """
    dtypes = tuple([(x.dtype, x.device) for x in pytree.tree_leaves((args, kwargs)) if type(x) is DTensor])
    if all(dtype in _FLOATS for dtype, _ in dtypes) or (func, dtypes) in _checked:
        return
    args, kwargs = pytree.tree_map(_of_size_1, (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng([]), unobserved():
        try:
            func(*args, **kwargs)
        except Exception as error:
            if _LIMIT.search(str(error)):
                raise
    _checked.add((func, dtypes))


def _of_size_1(x: object) -> object:
    if type(x) is DTensor:
        return torch.ones([min(n, 1) for n in x._layout.shape], dtype=x.dtype, device=x.device)
    return x.detach().clone() if isinstance(x, Tensor) else x
