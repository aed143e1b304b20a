"""The API of `ShardedTensor`, as methods of `DTensor`, and tensors made of local shards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import SEQUENCE, checked, checked_init, describe, split_by_boxes
from shardwise._tensor import factories
from shardwise._tensor.arguments import check_dense
from shardwise._tensor.conversion import to_local
from shardwise._tensor.dtensor import DTensor, register_method, tag, to_layout
from shardwise._tensor.transforms import check_untransformed
from shardwise.errors import LayoutError, MismatchError, RuleError
from shardwise.sharded_tensor.specs import (
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
    extent,
    layout_of_shards,
    reshard,
    shards_of,
    spec_of,
)

ShardedTensor = DTensor
"""Another name of `shardwise.DTensor`."""


@checked_init
@dataclass(frozen=True, eq=False)
class LocalShard:
    """A shard that this rank holds.

    Args:
        tensor: its values; a shard of a `DTensor` shares its memory.
        metadata: its offsets, sizes and placement.

    Raises:
        LayoutError: the shape of the tensor differs from the metadata.
    """

    tensor: Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.metadata.shard_sizes:
            raise LayoutError(
                f"The shard {self.metadata} has shape {self.metadata.shard_sizes}, got a tensor of shape "
                f"{tuple(self.tensor.shape)}. Fix: LocalShard.from_tensor_and_offsets, which takes the sizes of the "
                f"tensor."
            )

    @staticmethod
    def from_tensor_and_offsets(tensor: Tensor, shard_offsets: Sequence[int], rank: int) -> "LocalShard":
        """The shard of `rank` that begins at `shard_offsets` and has the values and the shape of `tensor`."""
        return LocalShard(tensor, ShardMetadata(shard_offsets, tensor.shape, f"rank:{rank}/{tensor.device}"))


describe(Sequence[LocalShard], SEQUENCE)


# ---- methods of DTensor ---------------------------------------------------------------------------------------------


def local_shards(x: DTensor) -> list[LocalShard]:
    """The shards that this rank holds, none or several; they share the memory of `x`, and its gradients."""
    mine = [shard for shard in metadata(x) if shard.placement is not None and shard.rank == collectives.rank()]
    views = split_by_boxes(to_local(x, None), [shard.box for shard in mine])
    return [LocalShard(view, shard) for view, shard in zip(views, mine, strict=True)]


def local_tensor(x: DTensor) -> Tensor:
    """The only shard of this rank, with its gradient.

    Raises:
        RuleError: this rank has none or several; a NotImplementedError, as in torch.
        LayoutError: the tensor is Partial.
    """
    if x._layout.partial_axes:
        raise LayoutError(f"local_tensor(): {x._layout} is Partial, it has no shards. Fix: reshard it by a spec first.")
    rank = collectives.rank()
    if (count := len(x._layout.boxes(rank))) != 1:
        raise RuleError(
            f"local_tensor() needs one shard per rank, and rank {rank} has {count} of {x._layout}. "
            f"Fix: use local_shards()."
        )
    return x.to_local()


def metadata(x: DTensor) -> ShardedTensorMetadata:
    """All shards of all ranks; of replicas, only the first.

    Raises:
        LayoutError: the tensor is Partial.
    """
    spec, properties = _own_spec(x), TensorProperties(x.dtype, torch.strided, x.requires_grad)
    if spec is not None:
        return spec.build_metadata(x.shape, properties)
    return ShardedTensorMetadata(shards_of(x._layout), x.shape, properties)


def sharding_spec(x: DTensor) -> ShardingSpec:
    """The spec that made the tensor, or one that is equivalent to its layout.

    Raises:
        LayoutError: the layout is replicated or Partial, which no spec can express.
    """
    return _own_spec(x) or spec_of(x._layout)


def _own_spec(x: DTensor) -> ShardingSpec | None:
    """The spec that made `x`, unless `x` was redistributed later."""
    spec: ShardingSpec | None = x._spec
    made_here = spec is not None and spec.layout(x.shape, x._layout.mesh.sorted_ranks) == x._layout
    return spec if made_here else None


def gather(x: DTensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """`gather(dst, out=, dtype=)` gathers the full tensor on one rank; `gather(dim, index)` is `torch.gather`.

    A second positional argument is an index unless it is None, so a tensor to fill must be passed as `out=`.

    Raises:
        LayoutError: the index has a wrong dtype; or as for `gather_to`.
    """
    second = args[1] if len(args) > 1 else None
    if isinstance(second, Tensor) and (second.is_floating_point() or second.is_complex()):
        raise LayoutError("gather: a second positional argument is an index. Fix: pass the tensor to fill as out=.")
    if second is not None or "index" in kwargs or "dim" in kwargs:
        return Tensor.gather(x, *args, **kwargs)
    return gather_to(x, *args, **kwargs)


@checked
def gather_to(x: DTensor, dst: int = 0, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor | None:
    """The full tensor on one rank; other ranks receive nothing.

    Args:
        dst: the global rank.
        out: on `dst`, a plain tensor of the global shape to fill; ignored elsewhere.
        dtype: the dtype of the result on `dst`; the dtype of `out` if that is given.

    Returns:
        On `dst` the full tensor (`out`, if given), elsewhere None.

    Raises:
        LayoutError: `dst` is not a rank of the mesh, or `out` has another shape.
    """
    layout = x._layout
    if dst not in layout.mesh.ranks:
        raise LayoutError(f"gather: rank {dst} holds nothing of {layout}. Fix: take one of {layout.mesh.ranks}.")
    if isinstance(out, DTensor):
        raise LayoutError("gather: out is a plain tensor to fill, got a DTensor. Fix: torch.empty(x.shape).")
    if out is not None:
        check_dense(out, "gather(out=)")
    with torch.no_grad():
        gathered = to_layout(x.detach(), layout.gathered_on(dst)).to_local()
        if collectives.rank() != dst:
            return None
        if out is None:
            return gathered.to(dtype or gathered.dtype)
        if tuple(out.shape) != layout.shape:  # after the gather: the other ranks cannot check it
            raise LayoutError(
                f"gather: out has shape {tuple(out.shape)}, the tensor {layout.shape}. Fix: torch.empty(x.shape)."
            )
        return out.copy_(gathered)


# ---- construction ---------------------------------------------------------------------------------------------------


@checked
def init_from_local_shards(
    local_shards: Sequence[LocalShard], *global_size: object, process_group: object = None, init_rrefs: bool = False
) -> DTensor:
    """The tensor made of the shards of every rank, none or several.

    Args:
        local_shards: a single one on a rank keeps its memory; several are copied into one flat tensor.
        global_size: the global shape, as one sequence or as integers; by default the extent of all shards.
        process_group: the ranks that take part; None is all.
        init_rrefs: only False is supported, as in torch.

    Raises:
        RuleError: `init_rrefs=True`.
        MismatchError: dtypes, kinds of device, `requires_grad` or the given sizes differ between ranks, a shard is
            placed on another rank or kind of device, or is not a `LocalShard`.
        LayoutError: the shards overlap or leave a gap. All of these are the same error on every rank.
    """
    _check_no_rrefs(init_rrefs, "init_from_local_shards")
    mine = [s for s in local_shards if isinstance(s, LocalShard)]
    for s in mine:
        check_untransformed(s.tensor, "init_from_local_shards")
    ranks, rank = collectives.group_ranks(process_group), collectives.rank()
    members, size = tuple(sorted(ranks)), list(factories.shape_of(global_size))
    passed = [
        {"box": s.metadata.box, "placement": str(s.metadata.placement or ""), "device": s.tensor.device.type}
        | {"dtype": str(s.tensor.dtype), "requires_grad": s.tensor.requires_grad}
        for s in mine
    ]
    wrong_types = [type(s).__name__ for s in local_shards if not isinstance(s, LocalShard)]
    answers: list[Any] = collectives.gather_json([passed, size, wrong_types], members)
    by_rank = dict(zip(members, answers, strict=True))
    every = [(holder, shard) for holder in ranks for shard in by_rank[holder][0]]
    _check_consistent({holder: answer[1:] for holder, answer in by_rank.items()}, every)
    if not every:
        raise LayoutError("init_from_local_shards: no rank passed any shard. Fix: pass each on its rank.")
    shards = [ShardMetadata(s["box"][0], s["box"][1], s["placement"] or f"rank:{holder}") for holder, s in every]
    layout = layout_of_shards(shards, tuple(size) or extent(shards), ranks)
    full = {s.metadata.box: s.tensor.detach() for s in mine if s.metadata.box.numel}
    parts, shape = [full[box] for box in layout.boxes(rank) if box in full], layout.local_shape(rank)
    if len(parts) == 1 and parts[0].shape == shape:
        (local,) = parts
    elif parts:
        local = torch.cat([part.reshape(-1) for part in parts]).view(shape)
    else:
        dtype = getattr(torch, every[0][1]["dtype"].removeprefix("torch."))
        local = torch.empty(shape, dtype=dtype, device=layout.mesh.device_type)
    return tag(local, layout).requires_grad_(every[0][1]["requires_grad"])


def _check_consistent(sizes_and_types: dict[int, Any], every: list[tuple[int, dict[str, Any]]]) -> None:
    wrong = []
    for field in ("dtype", "device", "requires_grad"):
        if len({s[field] for _, s in every}) > 1:
            wrong += [f"  rank {rank}: {field} {s[field]}" for rank, s in every]
    if len({str(size) for size, _ in sizes_and_types.values()}) > 1:
        wrong += [f"  rank {rank}: global size {size or 'not given'}" for rank, (size, _) in sizes_and_types.items()]
    for rank, (_, types) in sizes_and_types.items():
        wrong += [f"  rank {rank}: passes a {kind} instead of a LocalShard" for kind in types]
    for rank, s in every:
        where, _, device = s["placement"].partition("/")
        if where and where != f"rank:{rank}":
            wrong.append(f"  rank {rank}: passes a shard placed on {s['placement']}")
        elif where and s["device"] != device.partition(":")[0]:
            wrong.append(f"  rank {rank}: passes a shard placed on {s['placement']} that is on {s['device']}")
        if (ndim := len(s["box"][0])) != len(every[0][1]["box"][0]):
            wrong.append(f"  rank {rank}: a shard of {ndim} dims, others have another number")
    if wrong:
        lines = "\n".join(dict.fromkeys(wrong))
        raise MismatchError(
            f"init_from_local_shards: the shards do not make one tensor:\n{lines}\n  Fix: pass shards of one dtype "
            f"and requires_grad, each on its rank and device, and the same global size everywhere."
        )


# ---- factories ------------------------------------------------------------------------------------------------------


def _factory(make: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """`make` of a global shape, sharded by a spec: `zeros(spec, 4, 8)`, `full(spec, (4, 8), 3.0)`."""

    @checked
    def factory(
        sharding_spec: ShardingSpec,
        *size: Any,
        process_group: object = None,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        init_rrefs: bool = False,
        **kwargs: Any,
    ) -> DTensor:
        _check_no_rrefs(init_rrefs, make.__name__)
        if pin_memory or memory_format is not torch.contiguous_format:
            got = f"{pin_memory=}, {memory_format=}"
            raise LayoutError(f"{make.__name__}: shards are contiguous and not pinned, got {got}. Fix: leave both out.")
        if make is factories.full and len(size) == 2 and not isinstance(size[0], int):  # full(spec, (4, 8), 3.0)
            size, kwargs = size[:1], {"fill_value": size[-1], **kwargs}
        shape = factories.shape_of((kwargs.pop("size"),) if "size" in kwargs else size)
        layout = sharding_spec.layout(shape, collectives.group_ranks(process_group))
        x = make(shape, device_mesh=layout.mesh, placements=layout.placements, **kwargs)
        x._spec = sharding_spec
        return x

    factory.__name__ = make.__name__
    factory.__doc__ = f"""`shardwise.{make.__name__}` of a global shape, sharded by `sharding_spec`.

    Args:
        sharding_spec: how to shard it.
        size: the global shape, as one sequence or as integers; `full` takes `fill_value` after a sequence.
        process_group: the ranks that take part; None is all.
        pin_memory, memory_format, init_rrefs: as in torch, where only the defaults are supported.
        kwargs: dtype, requires_grad, fill_value.

    Raises:
        LayoutError: the spec does not fit, has devices without a rank, or `pin_memory` or `memory_format` are given.
        RuleError: `init_rrefs=True`.
    """
    return factory


def _check_no_rrefs(init_rrefs: bool, what: str) -> None:
    if init_rrefs:
        raise RuleError(
            f"{what}: init_rrefs=True makes references to the shards of other ranks by torch's RPC, which shardwise "
            f"does not use. Fix: leave it out; reshard(), gather() or full_tensor() fetch elements of other ranks."
        )


empty = _factory(factories.empty)
"""`empty(spec, 4, 8)`: `shardwise.empty` of a global shape, sharded by a spec."""
zeros = _factory(factories.zeros)
"""`zeros(spec, 4, 8)`: `shardwise.zeros` of a global shape, sharded by a spec."""
ones = _factory(factories.ones)
"""`ones(spec, 4, 8)`: `shardwise.ones` of a global shape, sharded by a spec."""
full = _factory(factories.full)
"""`full(spec, (4, 8), 3.0)`: `shardwise.full` of a global shape, sharded by a spec."""
rand = _factory(factories.rand)
"""`rand(spec, 4, 8)`: `shardwise.rand` of a global shape, sharded by a spec."""
randn = _factory(factories.randn)
"""`randn(spec, 4, 8)`: `shardwise.randn` of a global shape, sharded by a spec."""

for _method in (local_shards, local_tensor, metadata, sharding_spec, gather, reshard):
    register_method(_method.__name__, _method)
