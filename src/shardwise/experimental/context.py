"""`context_parallel`: plain tensors sharded along the sequence inside a block, and their attention as a ring."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise import _collectives as collectives
from shardwise._attention.ring import Ring, Spans, ring_attention
from shardwise._attention.rules import without_torch_function
from shardwise._collectives import DeviceMesh
from shardwise._layout import Mesh, checked, shown
from shardwise._redistribute.transfers import Exchange
from shardwise._rules.row import Args, Kwargs, Op
from shardwise._tensor import DTensor
from shardwise._trace.comm_trace import Cause
from shardwise.errors import LayoutError, MeshError, RuleError

_CAUSE = Cause("internal", "scaled_dot_product_attention", "", "context_parallel: ring attention")


@checked
@contextmanager
def context_parallel(
    mesh: Mesh | DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
) -> Iterator[None]:
    """Inside, the buffers are this rank's part of the sequence, and attention is ring attention over all of it.

    The sequence is divided into two chunks a rank, the first and the last one for rank 0, then inwards: under a causal
    mask all ranks then compute about equally much. `F.scaled_dot_product_attention` and `nn.MultiheadAttention` with
    `need_weights=False` of plain tensors are ring attention; other ops see the rank's part. Call backward inside, too.

    Args:
        mesh: one axis, such as `mesh["cp"]`. All its ranks hold equal buffers.
        buffers: plain tensors without gradients that have the sequence as a dim, such as token ids, labels, positions
            and tables of rotary embeddings. Inside, each has another shape and other memory, in place.
        buffer_seq_dims: the sequence dim of each buffer; all have one length, of any size.
        no_restore_buffers: buffers that keep the part afterwards; others are restored.

    Raises:
        LayoutError: buffers that cannot be sharded.
        MeshError: a mesh of several axes, or one without this rank.
        RuleError: inside, attention with a mask or dropout, of other lengths than the parts of the ranks, of DTensors,
            or with `need_weights`.
    """
    ranks = _ranks_of(mesh)
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    kept = {id(x) for x in no_restore_buffers or ()}
    length = _checked_length(given, dims, kept)
    spans = _spans(length, len(ranks))
    originals = [x.detach() for x in given]
    at = ranks.index(collectives.rank())
    _replace(given, [_part(x, dim, spans[at]) for x, dim in zip(originals, dims, strict=True)])
    try:
        with _RingMode(ranks, spans):
            yield
    finally:
        restored = [(x, original) for x, original in zip(given, originals, strict=True) if id(x) not in kept]
        _replace([x for x, _ in restored], [original for _, original in restored])


@checked
@torch.no_grad()
def context_parallel_unshard(
    mesh: Mesh | DeviceMesh, buffers: Sequence[Tensor], seq_dims: Sequence[int]
) -> list[Tensor]:
    """Full tensors, without gradients, of tensors sharded as inside `context_parallel`, such as its logits.

    Args:
        mesh: the mesh of `context_parallel`.
        buffers: this rank's part of each tensor.
        seq_dims: the sequence dim of each tensor.

    Sends: for each tensor an all-gather; for all together one of 8 bytes a tensor.

    Raises:
        LayoutError: the lengths on the ranks are not those of `context_parallel`.
    """
    ranks = _ranks_of(mesh)
    if len(buffers) != len(seq_dims):
        raise _unequal_lists("context_parallel_unshard", len(buffers), "seq_dims", len(seq_dims))
    dims = [_dim(x, dim) for x, dim in zip(buffers, seq_dims, strict=True)]
    own = torch.tensor([x.shape[dim] for x, dim in zip(buffers, dims, strict=True)], dtype=torch.int64)
    counts = [len(dims)] * len(ranks)
    gathered = collectives.exchange_messages(own.repeat(len(ranks)), counts, counts, ranks)
    return [
        _unsharded(x, dim, lengths, ranks)
        for x, dim, lengths in zip(buffers, dims, gathered.view(len(ranks), -1).T.tolist(), strict=True)
    ]


def _unsharded(x: Tensor, dim: int, lengths: list[int], ranks: tuple[int, ...]) -> Tensor:
    spans = _spans(sum(lengths), len(ranks))
    expected = [sum(n for _, n in of_rank) for of_rank in spans]
    if lengths != expected:
        raise LayoutError(
            f"context_parallel_unshard: the ranks have {lengths} positions along dim {dim}; of a sequence of "
            f"{sum(lengths)} context_parallel gives them {expected}. Fix: pass what was computed from its buffers."
        )
    moved = x.movedim(dim, 0)
    flat = collectives.all_gather(moved.reshape(-1), [prod(moved.shape[1:]) * n for n in lengths], ranks)
    parts = flat.view(sum(lengths), *moved.shape[1:]).split([n for of_rank in spans for _, n in of_rank])
    firsts = [first for of_rank in spans for first, _ in of_rank]
    chunks = sorted(zip(firsts, parts, strict=True), key=lambda chunk: (chunk[0], len(chunk[1])))
    return torch.cat([chunk for _, chunk in chunks]).movedim(0, dim)


# ---- who has which positions --------------------------------------------------------------------------------


def _ranks_of(mesh: Mesh | DeviceMesh) -> tuple[int, ...]:
    mesh = collectives.as_mesh(mesh)
    if mesh.ndim != 1:
        raise MeshError(f"context_parallel takes a mesh of one axis, got {mesh}. Fix: one axis of it, mesh[name].")
    if mesh.coordinate(collectives.rank()) is None:
        raise MeshError(
            f"context_parallel: rank {collectives.rank()} is not on {mesh}. Fix: call it on the ranks of the mesh."
        )
    return mesh.sorted_ranks


@lru_cache(maxsize=256)
def _spans(length: int, ranks: int) -> tuple[Spans, ...]:
    """Two chunks for each rank: number i from the start, and number i from the end."""
    small, more = divmod(length, 2 * ranks)
    sizes = [small + (i < more) for i in range(2 * ranks)]
    chunks = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
    return tuple((chunks[i], chunks[-1 - i]) for i in range(ranks))


def _part(x: Tensor, dim: int, spans: Spans) -> Tensor:
    return torch.cat([x.narrow(dim, first, n) for first, n in spans], dim)


# ---- buffers ------------------------------------------------------------------------------------------------


def _checked_length(buffers: list[Tensor], dims: list[int], kept: set[int]) -> int:
    if not buffers:
        raise LayoutError(
            "context_parallel: no buffers, so the length of the sequence is unknown. Fix: buffers=[ids, labels], "
            "buffer_seq_dims=[1, 1]."
        )
    if len(buffers) != len(dims):
        raise _unequal_lists("context_parallel", len(buffers), "buffer_seq_dims", len(dims))
    if kept - {id(x) for x in buffers}:
        raise LayoutError("context_parallel: no_restore_buffers has a tensor that is not one of buffers. Fix: add it.")
    for i, x in enumerate(buffers):
        if isinstance(x, DTensor) or not isinstance(x, Tensor):
            what = "a DTensor" if isinstance(x, DTensor) else shown(x)
            raise LayoutError(
                f"context_parallel: buffers[{i}] is {what}; a plain tensor is wanted. Fix: a DTensor needs no "
                "context_parallel: shard its sequence dim, and its attention is ring attention."
            )
        if x.requires_grad:
            raise LayoutError(f"context_parallel: buffers[{i}] requires grad. Fix: pass what it is computed from.")
    if len({id(x) for x in buffers}) < len(buffers):
        raise LayoutError("context_parallel: a tensor is in buffers twice. Fix: name it once.")
    lengths = [x.shape[_dim(x, dim)] for x, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise LayoutError(
            f"context_parallel: the buffers have {lengths} positions along {dims}. Fix: dims of one sequence."
        )
    return lengths[0]


def _dim(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(f"context_parallel: dim {dim} of a buffer of shape {tuple(x.shape)}. Fix: its sequence dim.")
    return dim % x.ndim


def _unequal_lists(function: str, buffers: int, name: str, dims: int) -> LayoutError:
    return LayoutError(f"{function}: {buffers} buffers and {dims} {name}. Fix: one dim for each buffer.")


def _replace(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give buffers other values and shapes. Backward through values that autograd saved of them then raises."""
    for x, value in zip(buffers, values, strict=True):
        x.data = value
        torch.autograd.graph.increment_version(x)


# ---- attention ----------------------------------------------------------------------------------------------

# Functions that call others, in a version that a mode sees through: in a handler of a mode the mode is off.
_multi_head = without_torch_function(F.multi_head_attention_forward)
_backward = without_torch_function(torch.autograd.backward)
_RUN_BACKWARD: dict[Op, Op] = {
    Tensor.backward: lambda x, gradient=None, *args, **kwargs: _backward(x, gradient, *args, **kwargs),
    torch.autograd.backward: _backward,
    torch.autograd.grad: without_torch_function(torch.autograd.grad),
}


class _RingMode(TorchFunctionMode):
    """Attention inside the block. A mode, so other threads and simulated ranks are not concerned."""

    def __init__(self, ranks: tuple[int, ...], spans: tuple[Spans, ...]) -> None:
        super().__init__()
        self.ranks, self.spans, self.at = ranks, spans, ranks.index(collectives.rank())

    def __torch_function__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            if kwargs.get("need_weights", True):
                raise _refused("nn.MultiheadAttention with need_weights=True", "need_weights=False")
            with self:
                return _multi_head(*args, **kwargs)
        if func in _RUN_BACKWARD and not _has_dtensors(args, kwargs):
            with self:  # for checkpoints, which recompute
                return _RUN_BACKWARD[func](*args, **kwargs)
        return func(*args, **kwargs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Ring attention in place of `F.scaled_dot_product_attention`."""
        if _has_dtensors(query, key, value):
            raise _refused("attention of a DTensor", "shard its sequence dim, without context_parallel")
        if attn_mask is not None:
            raise _refused("an attn_mask", "is_causal=True, or DTensors sharded along the sequence, which take masks")
        if dropout_p > 0:
            raise _refused("attention with dropout", "dropout_p=0, or DTensors sharded along the sequence")
        length = sum(n for _, n in self.spans[self.at])
        lengths = [x.shape[-2] for x in (query, key, value)]
        if set(lengths) != {length}:
            raise _refused(
                f"attention of {lengths} queries, keys and values, where this rank has {length} positions,",
                "compute them from the buffers, with the sequence as dim -2",
            )
        q, k, v = (torch.empty_like(x, device="meta", requires_grad=False) for x in (query, key, value))
        F.scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)  # raises for shapes that do not fit
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        ring = Ring(Exchange(self.ranks, _CAUSE), self.at, self.spans, self.spans, is_causal, scale)
        return ring_attention(query, key, value, ring)


def _has_dtensors(*trees: object) -> bool:
    return any(isinstance(x, DTensor) for x in pytree.tree_leaves(trees))


def _refused(what: str, fix: str) -> RuleError:
    return RuleError(f"context_parallel: {what} inside is not ring attention. Fix: {fix}.")
