"""Ops on lists of tensors: foreach and fused kernels, element by element on the local tensors; and `embedding_bags`."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._layout import REPLICATE, Layout, Mesh, Partial, Shard
from shardwise._lookups import lookup
from shardwise._lookups.bad_ids import StraddlingError
from shardwise._lookups.requests import Lookup, exchange_axes
from shardwise._lookups.rules import embedding_bags
from shardwise._redistribute.run_plan import redistribute_local
from shardwise._rules.local_context import LocalContext
from shardwise._rules.registry import handler, handler_of_family
from shardwise._rules.row import Args, Kwargs, Op, arguments
from shardwise._tensor.dispatch.dispatcher import prepared
from shardwise._tensor.dispatch.operands import is_outside
from shardwise._tensor.dispatch.resolve import Recipe
from shardwise._tensor.dispatch.view_copies import before_changes, invalidate
from shardwise._tensor.dtensor import DTensor, check_owners, plain, tag, to_layout
from shardwise._trace.comm_trace import Cause
from shardwise.errors import RuleError

ONE_BY_ONE: dict[str, Callable[..., Tensor]] = {
    "_foreach_norm": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype),
    "_foreach_powsum": lambda x, ord=2, dtype=None: torch.linalg.vector_norm(x, ord, dtype=dtype) ** ord,
    "_foreach_max": torch.max,
}
ORDINARY = {"_foreach_maximum_": "clamp_min_", "_foreach_minimum_": "clamp_max_"}  # torch's names for the same in place
KEYWORDS = {
    "alpha": "alpha",
    "value": "value",
    "scalars": "value",
    "non_blocking": "non_blocking",
}  # keywords of the ordinary ops
_PARTIAL = Cause("operand", "_foreach_norm", "a Partial tensor", "a norm needs reduced values")


@handler_of_family(
    lambda func: getattr(func, "__name__", "").startswith(("_foreach_", "_fused_", "_amp_foreach_")), is_op=True
)
def run(func: Op, args: Args, kwargs: Kwargs) -> object:
    """Run a list op on the local tensors if all lists have the same layouts; else each position by the ordinary op."""
    name = func.__name__.partition(".")[0]  # without that of an overload
    if name in ONE_BY_ONE:
        return _reductions(name, *args, **kwargs)
    args = tuple([_number(name, a) if type(a) is DTensor else a for a in args])
    kwargs = {k: _number(name, a) if type(a) is DTensor else a for k, a in kwargs.items()}
    lists = [a for a in (*args, *kwargs.values()) if _is_tensor_list(a)]
    lead, in_place, layouts = lists[0], name.endswith("_"), _same_layouts(lists)
    if layouts is None or name == "_foreach_mm":
        return _one_by_one(name, lists, args, kwargs)
    view_copies = before_changes(name, lead) if in_place else []
    check_owners(name, filter(None, layouts))
    with DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            _found_anywhere(args[1], lead)
    if view_copies:
        invalidate(view_copies)
    if in_place or out is None:
        return out
    return type(out)([tag(x, layout) if layout is not None else x for x, layout in zip(out, layouts, strict=True)])


def _same_layouts(lists: Sequence[Sequence[Tensor]]) -> list[Layout | None] | None:
    """The layouts in the first list, None for plain tensors, if all lists have these and none is Partial."""
    found: list[Layout | None] | None = None
    for tensors in lists:
        layouts = [x._layout if type(x) is DTensor else None for x in tensors]
        if found is None:
            found = layouts
        elif layouts != found and any(layouts + [x.ndim for x in tensors]):  # else step counters and other numbers
            return None
    return None if found is None or any(layout is not None and layout.partial_axes for layout in found) else found


def _found_anywhere(found_inf: Tensor, grads: Sequence[Any]) -> None:
    """Combine over ranks what one rank found in its shards: ranks must agree on whether to step."""
    for mesh in dict.fromkeys(x._layout.mesh for x in grads if type(x) is DTensor):
        src = Layout(mesh, [Partial("max")] * mesh.ndim, found_inf.shape)
        found_inf.copy_(
            redistribute_local(found_inf, src, src.replicated(), Cause("internal", "_amp_foreach_non_finite_check"))
        )


def _is_tensor_list(a: object) -> bool:
    return isinstance(a, list | tuple) and bool(a) and isinstance(a[0], Tensor)


def _one_by_one(name: str, lists: Sequence[Sequence[Tensor]], args: Args, kwargs: Kwargs) -> object:
    """Each position of the lists by the ordinary op, as torch does where shapes differ.

    Raises:
        RuleError: a fused op, which has no ordinary one; or a plain tensor would be changed.
    """
    lead, in_place = lists[0], name.endswith("_")
    if not name.startswith("_foreach_"):
        raise RuleError(
            f"{name}: tensors at one position of the lists need one layout, without Partial. "
            f"Fix: redistribute them, or make the optimizer with fused=False."
        )
    for i, x in enumerate(lead if in_place else ()):
        if type(x) is not DTensor and any(type(a[i]) is DTensor for a in lists[1:]):
            raise RuleError(f"{name} would change plain tensor {i} in place with a DTensor. Fix: make both alike.")
    one = getattr(Tensor if in_place else torch, ORDINARY.get(name, name.removeprefix("_foreach_")))
    operands = [*args, *(a for k, a in kwargs.items() if k not in KEYWORDS)]
    named = {KEYWORDS[k]: a for k, a in kwargs.items() if k in KEYWORDS}
    if len(operands) == 4:  # addcmul and addcdiv take their factor by position too
        named["value"] = operands.pop()
    if isinstance(factors := named.get("value"), Tensor):
        named["value"] = factors.tolist()

    def at(i: int, a: object) -> object:
        return a[i] if isinstance(a, list | tuple) else a

    out = tuple(
        [one(*[at(i, a) for a in operands], **{k: at(i, a) for k, a in named.items()}) for i in range(len(lead))]
    )
    return lead if in_place else out


def _number(name: str, x: DTensor) -> Tensor:
    """A DTensor beside the lists as a plain number."""
    if x._layout.shape:
        raise RuleError(
            f"{name}: a tensor operand beside the lists must have no dims, got shape {x._layout.shape}. "
            f"Fix: x.squeeze() of one element, or a list with a tensor for each position."
        )
    why = "a number beside lists has to be replicated"
    cause = Cause("operand", name, x._name or "a number beside the lists", why)
    return plain(to_layout(x, x._layout.replicated(), cause))


# ---- reductions -------------------------------------------------------------------------------------------------


def _reductions(name: str, self: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """One number a tensor. All norms of a mesh and dtype share an exchange."""
    norms: dict[int, Tensor] = {}
    if name == "_foreach_norm":
        for mesh, members in exchange_groups(self):
            row = norms_of([self[i] for i in members], *args, **kwargs)
            norms |= zip(members, [tag(x, of_numbers(mesh)) for x in row.unbind()], strict=True)
    one = ONE_BY_ONE[name]
    return tuple([norms[i] if i in norms else one(x, *args, **kwargs) for i, x in enumerate(self)])


def of_numbers(mesh: Mesh) -> Layout:
    return Layout(mesh, [REPLICATE] * mesh.ndim, ())


def exchange_groups(tensors: Sequence[Tensor]) -> list[tuple[Mesh, list[int]]]:
    """The DTensors that may share an exchange: of one mesh, dtype and device, with elements."""
    groups: dict[Any, list[int]] = {}
    with DisableTorchFunctionSubclass():
        for i, x in enumerate(tensors):
            if type(x) is DTensor and 0 not in x._layout.shape:
                groups.setdefault((x._layout.mesh, x.dtype, x.device), []).append(i)
    return [(mesh, members) for (mesh, *_), members in groups.items() if not is_outside(mesh)]


def norms_of(tensors: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None) -> Tensor:
    """Norms of tensors of one mesh and dtype, plain: the norm over ranks of the norms of local tensors.

    One row for each rank of the axes that shard any of them. Among replicas, the first one on the axis counts.
    """
    tensors = [to_layout(x, x._layout.reduced(), _PARTIAL) if x._layout.partial_axes else x for x in tensors]
    distinct = {id(x._layout): x._layout for x in tensors}
    check_owners("norm", distinct.values())
    mesh: Mesh = tensors[0]._layout.mesh
    rank = collectives.rank()
    here = mesh.coordinate(rank)
    assert here is not None
    axes = {a for layout in distinct.values() for a, p in enumerate(layout.placements) if p != REPLICATE}
    counts = {
        known: all(not here[a] or layout.placements[a] != REPLICATE for a in axes) for known, layout in distinct.items()
    }
    empty = {known for known, layout in distinct.items() if not layout.local_numel(rank)}
    nothing = 0.0 if ord >= 0 else float("inf")
    with DisableTorchFunctionSubclass():
        result = (tensors[0].dtype if dtype is None else dtype).to_real()
        exact = torch.float32 if result.itemsize < 4 else dtype
        held = [x for x in tensors if id(x._layout) not in empty]
        full = iter(torch._foreach_norm(held, ord, dtype=exact) if held else ())
        # torch has no maximum of an empty tensor.
        local_norms = [x.sum(dtype=exact).abs() + nothing if id(x._layout) in empty else next(full) for x in tensors]
        row = torch.stack(local_norms)
        if not all(counts.values()):
            counting = torch.tensor([counts[id(x._layout)] for x in tensors], device=row.device)
            row = torch.where(counting, row, nothing)
    if axes:
        placements = [Shard(0) if a in axes else REPLICATE for a in range(mesh.ndim)]
        rows = Layout(mesh, placements, (prod(mesh.shape[a] for a in axes), len(tensors)))
        row = plain(torch.linalg.vector_norm(tag(row[None], rows), ord or 1, 0))  # numbers of nonzeros add up
    return row.to(result)


# ---- embedding_bags: each lookup gets its recipe, then those over the same ranks run together -------------------

Member = tuple[int, Lookup, Callable[[], Tensor]]  # position, lookup, the lookup with an exchange of its own


@handler(embedding_bags, is_op=True)
def _embedding_bags(func: object, args: Args, kwargs: Kwargs) -> list[Tensor]:
    inputs, weights, starts, mode, sparse = arguments(embedding_bags, args, kwargs).values()
    results: dict[int, Tensor] = {}
    shared: dict[object, list[Member]] = {}
    for index, (ids, weight, start) in enumerate(zip(inputs, weights, starts, strict=True)):
        with DisableTorchFunctionSubclass():
            prepared = _prepared(ids, weight, start, {"mode": mode, "sparse": sparse})
            if prepared is not None:
                recipe, ctx, locals_, named = prepared
                assert recipe.local_impl is not None
                alone = partial(recipe.local_impl, ctx, *locals_, **named)
                axes = exchange_axes(ctx)
                if axes and recipe.local_impl is lookup.look_up_bags:
                    call = arguments(F.embedding_bag, tuple(locals_), named)
                    one = Lookup(ctx, call["input"], call["weight"], lookup.bags_of(ctx, call), sparse, axes)
                    shared.setdefault((ctx.ranks(axes), weight.dtype), []).append((index, one, alone))
                else:
                    results[index] = tag(alone(), ctx.output)
        if prepared is None:
            results[index] = F.embedding_bag(ids, weight, start, mode=mode, sparse=sparse)
    with DisableTorchFunctionSubclass():
        for members in shared.values():
            for (index, one, _), out in zip(members, _exchanged(members), strict=True):
                results[index] = tag(out, one.ctx.output)
    return [results[index] for index in range(len(inputs))]


def _exchanged(members: Sequence[Member]) -> list[Tensor]:
    try:
        return lookup.exchange_lookups([one for _, one, _ in members])
    except StraddlingError:  # each lookup sends its ids to their bags first
        return [alone() for _, _, alone in members]


def _prepared(
    ids: Tensor, weight: Tensor, start: Tensor | None, kwargs: Kwargs
) -> tuple[Recipe, LocalContext, list[Any], Kwargs] | None:
    """A lookup's recipe and local arguments; None if it shares no exchange: plain tensors, no row."""
    if type(weight) is not DTensor and type(ids) is not DTensor:
        return None
    return prepared(F.embedding_bag, (ids, weight, start), kwargs)
