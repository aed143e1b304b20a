"""Where gradients meet the duality: seeds, borders to plain tensors, and the `.grad` of leaves.

The gradient of a Replicate leaf stays a sum of unreduced summands while backward runs. Reading any `.grad`
reduces all gradients of that backward in one collective a mesh, dtype and set of axes: data parallelism,
gradient accumulation without communication and bucketed reduction are this one rule.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.autograd.graph import get_gradient_edge

from shardwise import collectives, meter
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Layout
from shardwise.mesh import Mesh
from shardwise.meter import Cause
from shardwise.movement import exchange_now, move
from shardwise.placement import PARTIAL, REPLICATE, Partial
from shardwise.steps import plan_move
from shardwise.tensor.dtensor import DTensor, moved, plain, tag

_raw_grad: Any = torch._C.TensorBase.grad
_get_raw = _raw_grad.__get__

_READ = Cause("gradient", ".grad", "gradients", "the summands of Replicate axes are added when a gradient is read")
_SET = Cause("gradient", ".grad =", "the gradient", "it is kept in the layout of its tensor")
_GRAD = Cause("gradient", "torch.autograd.grad", "a gradient", "it is returned in the layout of its input")
_SEED = Cause("gradient", "backward", "the gradient it starts with", "it is laid out for the tensor it belongs to")
_BORDER = Cause("gradient", "backward", "a gradient", "it crosses between a DTensor and a plain tensor", backward=True)
_OUTPUT = Cause("operand", "backward", "its output", "a maximum, minimum or product has no gradient until reduced")


class Batch:
    """Leaves whose gradients one backward has left unreduced."""

    def __init__(self) -> None:
        self.leaves: dict[int, DTensor] = {}


# One batch collects at a time for every rank; simulated ranks are told apart by their transport.
_collecting: "WeakKeyDictionary[Any, Batch]" = WeakKeyDictionary()
_watches = count(1)


def watch(leaf: DTensor) -> None:
    """Let a leaf with a Replicate axis join the batch of the backward that reaches it."""
    with DisableTorchFunctionSubclass():
        if leaf._watched or not leaf.requires_grad or not leaf.is_leaf or not _axes_to_reduce(leaf._layout):
            return
        leaf._watched = next(_watches)
        leaf.register_post_accumulate_grad_hook(_joined)  # type: ignore[no-untyped-call]


def _joined(leaf: Tensor) -> None:
    assert isinstance(leaf, DTensor)
    if leaf._grad_batch is None:
        here = collectives.transport()
        batch = _collecting.get(here)
        if batch is None:
            batch = _collecting[here] = Batch()
        batch.leaves[id(leaf)] = leaf
        leaf._grad_batch = batch


def read(x: DTensor) -> DTensor | None:
    """The gradient of `x` in its own layout (a gradient of a Partial tensor is Replicate)."""
    if x._grad_batch is not None:
        with DisableTorchFunctionSubclass():
            _reduce(x._grad_batch)
    if torch._C._is_torch_function_enabled():
        with DisableTorchFunctionSubclass():
            raw = _get_raw(x)
    else:
        raw = _get_raw(x)
    if type(raw) is DTensor and raw._layout is x._layout:
        return raw
    with DisableTorchFunctionSubclass():
        if _axes_to_reduce(x._layout):
            if raw is not None:  # a leaf that was not watched, or a non-leaf that retains its gradient
                _keep_reduced([(x, raw)])
            return x._reduced_grad
        if raw is not None and type(raw) is not DTensor:
            tag(raw, _readable(x._layout))
        return raw  # type: ignore[no-any-return]


def write(x: DTensor, value: Tensor | None) -> None:
    """Set or clear the gradient; a plain tensor is taken for the whole gradient."""
    if x._grad_batch is not None:
        x._grad_batch.leaves.pop(id(x), None)
        x._grad_batch = None
    if x._reduced_grad is not None:
        x._reduced_grad = None
    with DisableTorchFunctionSubclass():
        _raw_grad.__set__(x, None)
        if value is None:
            return
        shape = value._layout.shape if type(value) is DTensor else tuple(value.shape)
        if shape != x._layout.shape:
            raise LayoutError(f"A gradient must have the shape of its tensor: {x._layout.shape}, got {shape}.")
        replicated = x._layout.replicated()
        if type(value) is not DTensor:
            value = tag(value.detach(), replicated)
        if _axes_to_reduce(x._layout):
            x._reduced_grad = moved(value, _readable(x._layout), _SET)
        else:
            _raw_grad.__set__(x, moved(value, _readable(x._layout), _SET))


def _reduce(batch: Batch) -> None:
    here = collectives.transport()
    if _collecting.get(here) is batch:
        del _collecting[here]
    leaves, batch.leaves = batch.leaves.values(), {}
    waiting = []
    # Backward may reach leaves in another order on a rank whose kernels took another way, such as one for empty shards.
    for leaf in sorted(leaves, key=lambda leaf: leaf._watched):
        leaf._grad_batch = None
        raw = _raw_grad.__get__(leaf)
        if raw is not None:
            waiting.append((leaf, raw))
    _keep_reduced(waiting)


def _keep_reduced(waiting: Sequence[tuple[DTensor, Tensor]]) -> None:
    """Reduce gradients, the dense ones of a kind in one buffer, and add them to what was reduced before."""
    buckets: dict[Any, list[tuple[DTensor, Tensor]]] = {}
    for leaf, raw in waiting:
        _raw_grad.__set__(leaf, None)
        mesh, axes = leaf._layout.mesh, _axes_to_reduce(leaf._layout)
        if mesh.coordinate(collectives.rank()) is None:  # this rank holds none of the summands
            _add_reduced(leaf, plain(raw))
        elif raw.is_sparse:
            _add_reduced(leaf, _sum_sparse(plain(raw), leaf._layout))
        else:
            buckets.setdefault((mesh, axes, raw.dtype, raw.device), []).append((leaf, plain(raw)))
    for (mesh, axes, _, _), members in buckets.items():
        flat = torch.cat([raw.reshape(-1) for _, raw in members]) if len(members) > 1 else members[0][1].reshape(-1)
        line = mesh.submesh(axes, collectives.rank())
        src = Layout(line, [Partial()] * line.ndim, flat.shape)
        cause = _told(mesh, axes, [leaf for leaf, _ in members], flat) if meter.listening() else _READ
        flat = move(flat, src, src.replicated(), cause)
        for (leaf, _), piece in zip(members, flat.split([raw.numel() for _, raw in members]), strict=True):
            _add_reduced(leaf, piece.view(leaf._layout.local_shape(collectives.rank())))


def _told(mesh: Mesh, axes: tuple[int, ...], leaves: Sequence[DTensor], flat: Tensor) -> Cause:
    """The reduction for those who listen: whose gradients, and what the other lines of the mesh send as well."""
    elements = 0
    for line in {mesh.submesh(axes, rank) for rank in mesh.ranks}:
        src = Layout(line, [Partial()] * line.ndim, (sum(leaf._layout.local_numel(line.ranks[0]) for leaf in leaves),))
        elements += plan_move(src, src.replicated()).total_elements
    names = [leaf._name or "a leaf" for leaf in leaves]
    short = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    together = tuple(sorted(mesh.ranks)), elements * flat.element_size()
    return _READ._replace(operand=f"the gradient of {short}", together=together)


def _add_reduced(leaf: DTensor, total: Tensor) -> None:
    if leaf._reduced_grad is None:
        leaf._reduced_grad = tag(total.clone() if total._base is not None else total, _readable(leaf._layout))
    elif torch.is_grad_enabled() and total.requires_grad:
        leaf._reduced_grad = tag(plain(leaf._reduced_grad) + total, _readable(leaf._layout))
    else:
        with torch.no_grad():
            leaf._reduced_grad.add_(total)


def _sum_sparse(raw: Tensor, layout: Layout) -> Tensor:
    """Row-sparse summands of all ranks as one sparse tensor: indices and values travel, never the dense table."""
    own = raw.coalesce()
    line = layout.mesh.submesh(_axes_to_reduce(layout), collectives.rank())
    ranks = tuple(sorted(line.ranks))
    count = own.indices().shape[1]
    ones = [1] * len(ranks)
    counts = exchange_now(torch.tensor([count] * len(ranks)), ones, ones, ranks, _READ).tolist()

    def gathered(x: Tensor) -> list[Tensor]:
        width = prod(x.shape[1:])
        flat = x.reshape(-1).repeat(len(ranks))
        every = exchange_now(flat, [x.numel()] * len(ranks), [n * width for n in counts], ranks, _READ)
        return [piece.view(-1, *x.shape[1:]) for piece in every.split([n * width for n in counts])]

    indices = torch.cat(gathered(own.indices().t().contiguous())).t()
    values = torch.cat(gathered(own.values()))
    return torch.sparse_coo_tensor(indices, values, raw.shape, check_invariants=False).coalesce()


# ---- seeds and borders --------------------------------------------------------------------------------------


def as_cotangent(value: Tensor, layout: Layout, of: Layout, cause: Cause = _BORDER) -> Tensor:
    """A local gradient laid out as `layout` for a tensor laid out as `of`, in the dual layout of `of`.

    A replicated gradient of a replicated value becomes equal shares and not one share and zeros, because
    0 times an infinite local derivative is nan.
    """
    dual, shares = of.dual(), 1
    placements = list(layout.placements)
    for axis, (have, want) in enumerate(zip(layout.placements, dual.placements, strict=True)):
        if have == REPLICATE and want == Partial():
            placements[axis] = want
            shares *= layout.mesh.shape[axis]
    value = value * (1 / shares) if shares > 1 else value  # short complex dtypes cannot be divided
    return move(value, layout.replace(placements), dual, cause)


def _seed(output: DTensor, gradient: Any) -> Tensor:
    """The cotangent that backward starts with at `output`."""
    layout = output._layout
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, got shape {tuple(output.shape)}."
            )
        if all(p in (REPLICATE, PARTIAL) for p in layout.placements):
            shares = prod(n for n, p in zip(layout.mesh.shape, layout.placements, strict=True) if p == REPLICATE)
            with DisableTorchFunctionSubclass():
                return torch.full(
                    layout.local_shape(collectives.rank()), 1 / shares, dtype=output.dtype, device=output.device
                )
    whole = layout.replicated()
    if gradient is None:
        ones = torch.ones(whole.local_shape(collectives.rank()), dtype=output.dtype, device=output.device)
        return as_cotangent(ones, whole, layout, _SEED)
    if type(gradient) is DTensor:
        return as_cotangent(plain(gradient), gradient._layout, layout, _SEED)
    return as_cotangent(gradient, whole, layout, _SEED)


def _linear_output(output: Any) -> Any:
    """An output whose reduction is a maximum or the like has no cotangent until it is reduced."""
    if type(output) is not DTensor:
        return output
    parts = output._layout.placements
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in parts):
        return moved(output, output._layout.reduced(), _OUTPUT)
    return output


def _outputs_and_seeds(tensors: Any, grad_tensors: Any) -> tuple[list[Any], list[Any]]:
    outputs = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
    given = given if len(given) == len(outputs) else given * len(outputs)
    outputs = [_linear_output(x) for x in outputs]
    seeds = [_seed(x, g) if type(x) is DTensor else g for x, g in zip(outputs, given, strict=True)]
    with torch.enable_grad():  # torch compares the shapes of seeds and outputs: it must see the local ones
        return [plain(x) if type(x) is DTensor else x for x in outputs], seeds


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` with DTensors among the outputs or inputs."""
    outputs, seeds = _outputs_and_seeds(tensors, grad_tensors)
    edges = None if inputs is None else _edges([inputs] if isinstance(inputs, Tensor) else inputs)
    torch.autograd.backward(outputs, seeds, retain_graph=retain_graph, create_graph=create_graph, inputs=edges)


def _edges(inputs: Iterable[Any]) -> list[Any]:
    """Where gradients are wanted, without a DTensor among them.

    So torch runs the engine itself, and user code in it (hooks, recomputation) meets DTensors as anywhere else.
    """
    with DisableTorchFunctionSubclass():
        return [get_gradient_edge(x) if type(x) is DTensor else x for x in inputs]


def _backward_of_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    backward(*args, **kwargs)


def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`torch.autograd.grad` with DTensors: gradients come back in the layouts of their inputs."""
    outputs_arg, inputs_arg, *rest = args
    seeds_arg = rest[0] if rest else kwargs.pop("grad_outputs", None)
    if kwargs.pop("is_grads_batched", False):
        raise RuleError("torch.autograd.grad(is_grads_batched=True) is not supported on DTensors.")
    inputs = [inputs_arg] if isinstance(inputs_arg, Tensor) else list(inputs_arg)
    outputs, seeds = _outputs_and_seeds(outputs_arg, seeds_arg)
    materialize = kwargs.pop("materialize_grads", False)
    if materialize:
        kwargs["allow_unused"] = True
    found = torch.autograd.grad(outputs, _edges(inputs), seeds, **kwargs)

    def readable(x: Any, g: Tensor | None) -> Any:
        if g is None:
            return torch.zeros_like(x, requires_grad=bool(kwargs.get("create_graph"))) if materialize else None
        return moved(tag(g, x._layout.dual()), _readable(x._layout), _GRAD) if type(x) is DTensor else g

    return tuple(readable(x, g) for x, g in zip(inputs, found, strict=True))


@lru_cache(maxsize=4096)
def _axes_to_reduce(layout: Layout) -> tuple[int, ...]:
    """The axes whose ranks hold different summands of the gradient of a tensor laid out so."""
    return tuple(axis for axis in layout.dual().partial_axes if layout.mesh.shape[axis] > 1)


@lru_cache(maxsize=4096)
def _readable(layout: Layout) -> Layout:
    """The layout of the gradient that users see: that of the tensor, and whole where the tensor is in summands."""
    if not layout.partial_axes:
        return layout
    return layout.reduced()


class _Border(torch.autograd.Function):
    """Between a DTensor laid out as `layout` and a plain tensor whose gradient is laid out as `border`."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, border: Layout) -> Tensor:
        ctx.layout, ctx.border, ctx.shape = layout, border, local.shape
        return local.view_as(local)


class ToPlain(_Border):
    """From a DTensor to a plain tensor: the gradient that comes back is laid out as `border`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return as_cotangent(grads[0], ctx.border, ctx.layout), None, None


class FromPlain(_Border):
    """From a plain tensor to a DTensor: the gradient leaves laid out as `border`."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if ctx.layout.mesh.coordinate(collectives.rank()) is None:  # nothing of it was used here
            return grads[0].new_zeros(ctx.shape), None, None
        return move(grads[0], ctx.layout.dual(), ctx.border, _BORDER), None, None


DTensor.grad = property(read, write, DTensor.grad.fdel, DTensor.grad.__doc__)  # type: ignore[assignment, attr-defined]
DTensor._write_grad = staticmethod(write)
DTensor._backward = staticmethod(backward)
DTensor._specials |= {torch.autograd.backward: _backward_of_torch, torch.autograd.grad: grad}
