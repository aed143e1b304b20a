"""The shards of a `DTensor`, one by one: what `ShardedTensor` offers, on the one tensor there is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise import collectives
from shardwise.errors import LayoutError, MismatchError
from shardwise.layout import Box, Layout, split_by_boxes
from shardwise.sharded_tensor.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.sharded_tensor.specs import ShardingSpec, layout_of_shards, shards_of, spec_of, words_of
from shardwise.tensor import factories
from shardwise.tensor.conversion import sent_by
from shardwise.tensor.dtensor import DTensor, moved, plain, register_method, remembering, tag

ShardedTensor = DTensor


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A shard that this rank holds.

    Args:
        tensor: its values; of a shard of a `DTensor` they share its memory.
        metadata: where it stands.

    Raises:
        LayoutError: the tensor has another shape than the metadata tell.
    """

    tensor: Tensor
    metadata: ShardMetadata

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.metadata.shard_sizes:
            raise LayoutError(
                f"The shard {self.metadata} has shape {self.metadata.shard_sizes}, got a tensor of shape "
                f"{tuple(self.tensor.shape)}."
            )

    @staticmethod
    def from_tensor_and_offsets(tensor: Tensor, shard_offsets: Sequence[int], rank: int) -> "LocalShard":
        """The shard of `rank` that begins at `shard_offsets` and has the values and the shape of `tensor`."""
        where = f"rank:{rank}/{tensor.device}"
        return LocalShard(tensor, ShardMetadata(shard_offsets, tensor.shape, where))


# ---- of one tensor --------------------------------------------------------------------------------------------------


def local_shards(x: DTensor) -> list[LocalShard]:
    """The shards that this rank holds, none or several; they share the memory of `x`, outside of autograd."""
    rank = collectives.rank()
    mine = [shard for shard in metadata(x) if shard.placement is not None and shard.rank == rank]
    views = split_by_boxes(plain(x.detach()), [shard.box for shard in mine])
    return [LocalShard(view, shard) for view, shard in zip(views, mine, strict=True)]


def local_tensor(x: DTensor) -> Tensor:
    """The only shard of this rank, with its gradient.

    Raises:
        LayoutError: this rank has none, or several, or a summand.
    """
    if x._layout.partial_axes:
        raise LayoutError(f"local_tensor(): {x._layout} has summands, not shards. Fix: reshard it by a spec first.")
    count = len(x._layout.boxes(collectives.rank()))
    if count != 1:
        raise LayoutError(
            f"local_tensor() is for one shard a rank, and rank {collectives.rank()} has {count} of {x._layout}. "
            f"Fix: use local_shards()."
        )
    return x.to_local()


def metadata(x: DTensor) -> ShardedTensorMetadata:
    """All shards of all ranks; of copies, the first.

    Raises:
        LayoutError: a tensor in summands has no shards.
    """
    properties = TensorProperties(x.dtype, torch.strided, x.requires_grad)
    spec = _own_spec(x)
    if spec is not None:
        return spec.build_metadata(tuple(x.shape), properties)
    return ShardedTensorMetadata(shards_of(x._layout), x.shape, properties)


def sharding_spec(x: DTensor) -> ShardingSpec:
    """The spec it was made by, or one that says the same as its layout.

    Raises:
        LayoutError: a layout with copies or summands, which no spec tells of.
    """
    return _own_spec(x) or spec_of(x._layout)


def _own_spec(x: DTensor) -> ShardingSpec | None:
    """The spec that `x` was made by, unless `x` is laid out otherwise by now."""
    spec: ShardingSpec | None = x._spec
    if spec is None or spec.layout(x.shape, tuple(sorted(x._layout.mesh.ranks))) != x._layout:
        return None
    return spec


def gather(x: DTensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """`gather(dst, out=, dtype=)`: the whole tensor on one rank. `gather(dim, index)` is `torch.gather`, as ever.

    A second positional argument is taken for an index, so `out` has to be named.

    Raises:
        LayoutError: it is no index, as its dtype tells; or as of `whole_on`.
    """
    if len(args) > 1 and isinstance(args[1], Tensor) and (args[1].is_floating_point() or args[1].is_complex()):
        raise LayoutError("gather: a second positional argument is an index. Fix: pass what is to be filled as out=.")
    if len(args) > 1 or "index" in kwargs or "dim" in kwargs:
        return Tensor.gather(x, *args, **kwargs)
    return whole_on(x, *args, **kwargs)


def whole_on(x: DTensor, dst: int = 0, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor | None:
    """The whole tensor on one rank, which alone receives anything.

    Args:
        dst: the global rank that wants it.
        out: on `dst`, a tensor of the global shape to be filled; elsewhere ignored.
        dtype: convert on `dst` to this dtype; that of `out` if that is given.

    Returns:
        On `dst` the whole (`out`, if given), elsewhere None.

    Raises:
        LayoutError: `dst` is not a rank of the mesh, or `out` has another shape.
    """
    layout, rank = x._layout, collectives.rank()
    if dst not in layout.mesh.ranks:
        raise LayoutError(f"gather: rank {dst} holds nothing of {layout}. Fix: take one of {layout.mesh.ranks}.")
    with torch.no_grad():
        whole = moved(x.detach(), layout.gathered_on(dst)).to_local()
        if rank != dst:
            return None
        if out is None:
            return whole if dtype is None else whole.to(dtype)
        if tuple(out.shape) != layout.shape:  # only now, for the other ranks do not know
            raise LayoutError(f"gather: out has shape {tuple(out.shape)}, the tensor {layout.shape}.")
        return out.copy_(whole)


def reshard(x: DTensor, resharding_spec: ShardingSpec, process_group: Any = None) -> DTensor:
    """The same tensor as `resharding_spec` cuts it; every element is sent at most once to a rank that lacks it.

    Args:
        resharding_spec: how to cut it.
        process_group: who holds the result; None is who holds `x`. Ranks that leave call this as well, for which the
            group is given by its ranks: of a group of torch they know nothing.

    Raises:
        LayoutError: the spec does not fit.
    """
    known = process_group is not None
    ranks = collectives.group_ranks(process_group, leaving=True) if known else tuple(sorted(x._layout.mesh.ranks))
    layout = resharding_spec.layout(x._layout.shape, ranks)
    result = moved(x, layout)
    if result is x:  # which stays what its own spec made it
        result = remembering(x, tag(plain(x), layout))
    result._spec = resharding_spec
    return result


def shard_by(spec: ShardingSpec, tensor: Tensor, src_rank: int = 0, process_group: Any = None) -> DTensor:
    """What `ShardingSpec.shard` does; a `DTensor` is cut anew, whatever the source."""
    if isinstance(tensor, DTensor):
        return reshard(tensor, spec, process_group)
    ranks = collectives.group_ranks(process_group)
    _agree_on_source(spec, tensor, src_rank, ranks)
    layout = spec.layout(tensor.shape, ranks)
    with torch.no_grad():
        whole = tensor.detach() if tensor.is_meta else tensor.detach().to(layout.mesh.device_type)
        result = tag(sent_by(ranks[src_rank], whole, layout), layout)
    result._spec = spec
    return result.requires_grad_(tensor.requires_grad)  # type: ignore[return-value]


def _agree_on_source(spec: ShardingSpec, tensor: Any, src_rank: int, ranks: tuple[int, ...]) -> None:
    """That all ranks mean the same, and that the source has what it is to give."""
    problem, said = None, {"spec": repr(spec), "src_rank": src_rank}
    if not isinstance(tensor, Tensor):
        problem = f"only a Tensor can be sharded, got {type(tensor).__name__}."
    else:
        said = {
            "spec": words_of(spec, tensor.shape),
            "src_rank": src_rank,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
        }
        if not 0 <= src_rank < len(ranks):
            problem = f"src_rank is a position in the process group, 0 to {len(ranks) - 1}, got {src_rank}."
        elif tensor.layout is not torch.strided:
            problem = f"only a dense tensor can be sharded, got one of layout {tensor.layout}."
        elif tensor.is_meta and collectives.rank() == ranks[src_rank]:
            problem = f"rank {ranks[src_rank]} is the source, but its tensor is on the meta device and has no values."
    collectives.agree(
        "how to shard a tensor",
        said | {"problem": problem},
        tuple(sorted(ranks)),
        "pass the same spec, source, shape, dtype and requires_grad everywhere, and values on the source.",
    )
    if problem:
        raise LayoutError(f"shard: {problem}")


# ---- made of shards -------------------------------------------------------------------------------------------------


def init_from_local_shards(
    local_shards: Sequence[LocalShard],
    *global_size: Any,
    process_group: Any = None,
) -> DTensor:
    """The tensor of which every rank passes the shards it holds, none or several.

    Args:
        local_shards: a single one on a rank keeps its memory; several are laid one after the other in new memory.
        global_size: the whole shape, as one sequence or as integers; none is the reach of all shards.
        process_group: who takes part; None is everybody.

    Raises:
        MismatchError: dtypes, kinds of device, `requires_grad` or the given sizes differ between ranks, a shard is
            placed on another rank or kind of device, or is no `LocalShard`.
        LayoutError: the shards overlap or leave a gap. All of these are the same error on every rank.
    """
    ranks = collectives.group_ranks(process_group)
    size = list(factories.shape_of(global_size))
    said: dict[str, Any] = {
        "size": size,
        "strange": [type(s).__name__ for s in local_shards if not isinstance(s, LocalShard)],
        "shards": [
            {
                "offsets": list(s.metadata.shard_offsets),
                "sizes": list(s.metadata.shard_sizes),
                "placement": str(s.metadata.placement),
                "device": s.tensor.device.type,
                "dtype": str(s.tensor.dtype),
                "requires_grad": s.tensor.requires_grad,
            }
            for s in local_shards
            if isinstance(s, LocalShard)
        ],
    }
    every = dict(zip(sorted(ranks), collectives.gather_json(said, tuple(sorted(ranks))), strict=True))
    _check_alike(every)
    shards = [
        ShardMetadata(s["offsets"], s["sizes"], f"rank:{rank}" if s["placement"] == "None" else s["placement"])
        for rank in ranks
        for s in every[rank]["shards"]
    ]
    if not shards:
        raise LayoutError("init_from_local_shards: no rank passed any shard.")
    reach = [max(s.shard_offsets[d] + s.shard_sizes[d] for s in shards) for d in range(len(shards[0].shard_sizes))]
    layout = layout_of_shards(shards, tuple(size or reach), ranks)
    result = tag(_joined(local_shards, layout, every), layout)
    needs_grad = any(s["requires_grad"] for said in every.values() for s in said["shards"])
    return result.requires_grad_(needs_grad)  # type: ignore[return-value]


def _check_alike(every: dict[int, Any]) -> None:
    wrong = []
    for field in ("dtype", "device", "requires_grad"):
        found = {s[field] for said in every.values() for s in said["shards"]}
        if len(found) > 1:
            wrong += [
                f"  rank {r}: {field} {sorted({str(s[field]) for s in said['shards']})}" for r, said in every.items()
            ]
    if len({str(said["size"]) for said in every.values()}) > 1:
        wrong += [f"  rank {rank}: global size {said['size'] or 'not given'}" for rank, said in every.items()]
    for rank, said in every.items():
        wrong += [f"  rank {rank}: passes a {kind} where a LocalShard belongs" for kind in said["strange"]]
        for s in said["shards"]:
            if s["placement"] != "None" and not s["placement"].startswith(f"rank:{rank}/"):
                wrong.append(f"  rank {rank}: passes a shard placed on {s['placement']}")
            elif s["placement"] != "None" and s["device"] != s["placement"].partition("/")[2].partition(":")[0]:
                wrong.append(f"  rank {rank}: passes a shard placed on {s['placement']} that is on {s['device']}")
            if len(s["sizes"]) != len(next(t["sizes"] for u in every.values() for t in u["shards"])):
                wrong.append(f"  rank {rank}: a shard of {len(s['sizes'])} dims, others have another number")
    if wrong:
        raise MismatchError(
            "init_from_local_shards: the shards do not make one tensor:\n" + "\n".join(wrong) + "\n  Fix: pass shards "
            "of one dtype and requires_grad, each on its rank and device, and the same global size everywhere."
        )


def _joined(shards: Sequence[LocalShard], layout: Layout, every: dict[int, Any]) -> Tensor:
    """The local tensor that `layout` wants of these shards."""
    rank = collectives.rank()
    full = [s for s in shards if s.metadata.box.numel]
    wanted = layout.local_shape(rank)
    if len(full) == 1 and tuple(full[0].tensor.shape) == wanted:
        return full[0].tensor.detach()
    dtype = getattr(torch, next(s["dtype"] for said in every.values() for s in said["shards"]).removeprefix("torch."))
    if not full:
        return torch.empty(wanted, dtype=dtype, device=layout.mesh.device_type)
    order: list[Box] = list(layout.boxes(rank))
    full.sort(key=lambda s: order.index(s.metadata.box))
    return torch.cat([s.tensor.detach().reshape(-1) for s in full]).view(wanted)


# ---- filled ---------------------------------------------------------------------------------------------------------


def _factory(make: Any) -> Any:
    def made(sharding_spec: ShardingSpec, *size: Any, process_group: Any = None, **kwargs: Any) -> DTensor:
        size = (kwargs.pop("size"),) if "size" in kwargs else size
        if make is factories.full and len(size) == 2 and not isinstance(size[0], int):  # as torch takes it
            shape, kwargs = tuple(size[0]), {"fill_value": size[1], **kwargs}
        else:
            shape = factories.shape_of(size)
        layout = sharding_spec.layout(shape, collectives.group_ranks(process_group))
        x: DTensor = make(shape, device_mesh=layout.mesh, placements=layout.placements, **kwargs)
        x._spec = sharding_spec
        return x

    made.__name__ = make.__name__
    made.__doc__ = f"""`shardwise.{make.__name__}` of a global shape, cut as `sharding_spec` says.

    Args:
        sharding_spec: how it is cut.
        size: the global shape, as one sequence or as integers.
        process_group: who takes part; None is everybody.
        kwargs: dtype, requires_grad; for `full`, fill_value, which may also follow the shape given as a sequence.
    """
    return made


empty, zeros, ones, full, rand, randn = map(
    _factory, (factories.empty, factories.zeros, factories.ones, factories.full, factories.rand, factories.randn)
)

ShardingSpec._shard = staticmethod(shard_by)
register_method("local_shards", local_shards)
register_method("local_tensor", local_tensor)
register_method("metadata", metadata)
register_method("sharding_spec", sharding_spec)
register_method("gather", gather)
register_method("reshard", reshard)
