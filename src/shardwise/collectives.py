"""The one file that talks to `torch.distributed`.

Everything above speaks to a `Transport`: the processes of `torch.distributed`, or ranks simulated in one
process (`shardwise.testing`). Two collectives carry all data: an all-to-all with split sizes, and an
all-reduce. What is sent is told to `shardwise.meter`, so plans can be checked against it.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

# Its functions have the world of the moment of their import as a default argument. Where a world exists by then
# (torch.optim imports it by way of torch._dynamo), that world is never freed, and gloo's threads abort the process
# at its end, once in some dozens of times.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from shardwise import meter
from shardwise.errors import MeshError, MismatchError
from shardwise.mesh import Mesh, ring_elements

Ranks = tuple[int, ...]
T = TypeVar("T")

# Counted where it happens, kept in `shardwise.meter`; these names are reached from here as well.
CommMeter = meter.CommMeter
count_comms = meter.count_comms


class Transport(Protocol):
    """How ranks reach each other. `ranks` are global ranks in rising order; all of them make the same call."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
        """Send `send_counts[i]` elements of the 1-D `send` to `ranks[i]`; return what came, in rank order."""
        ...

    def all_reduce(self, local: Tensor, reduce_op: str, ranks: Ranks) -> Tensor:
        """A new tensor: the reduction (sum, max, min, product) of `local` over `ranks`."""
        ...

    def draw_seed(self) -> int:
        """A number from torch's CPU generator, drawn once a call and equal on all ranks seeded alike."""
        ...


# ---- which transport this thread uses ---------------------------------------------------------------------


class _Here(threading.local):
    transport: Transport | None = None


_here = _Here()


def transport() -> Transport:
    """The transport of this thread: a simulated rank's, the process group's, or a world of one rank."""
    if _here.transport is not None:
        return _here.transport
    return _TORCH if dist.is_initialized() else _SOLO


@contextmanager
def using(transport: Transport) -> Iterator[None]:
    """Let this thread be one rank of another transport."""
    before, _here.transport = _here.transport, transport
    try:
        with meter.apart():
            yield
    finally:
        _here.transport = before


def rank() -> int:
    return transport().rank


def world_size() -> int:
    return transport().world_size


# ---- the two collectives ----------------------------------------------------------------------------------


def all_to_all(send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
    """Exchange pieces of a 1-D tensor; the piece for this rank itself is copied and not counted."""
    here = transport()
    if len(ranks) == 1:
        return send.clone()
    if meter.listening():
        own = send_counts[ranks.index(here.rank)]
        meter.note_collective("all_to_all", (sum(send_counts) - own) * send.element_size())
    return here.all_to_all(send, send_counts, recv_counts, ranks)


def all_reduce(local: Tensor, reduce_op: str, ranks: Ranks) -> Tensor:
    """Reduce over `ranks` into a new tensor. Counted as a ring: each rank sends 2 (n - 1) / n of it."""
    here = transport()
    if len(ranks) == 1:
        return local.clone()
    if meter.listening():
        sent = ring_elements(local.numel(), len(ranks), ranks.index(here.rank)) * local.element_size()
        meter.note_collective("all_reduce", sent)
    return here.all_reduce(local, reduce_op, ranks)


# ---- agreement --------------------------------------------------------------------------------------------


def gather_bytes(data: bytes, ranks: Ranks) -> list[bytes]:
    """Every rank's `data`, in rank order. Two collectives: lengths, then contents."""
    count = len(ranks)
    lengths = all_to_all(torch.tensor([len(data)] * count), [1] * count, [1] * count, ranks).tolist()
    buffer = torch.frombuffer(bytearray(data) * count, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    received = all_to_all(buffer, [len(data)] * count, lengths, ranks)
    return [piece.numpy().tobytes() for piece in received.split(lengths)]


def gather_json(value: T, ranks: Ranks) -> list[T]:
    """Every rank's JSON value, in rank order; no pickle travels."""
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), ranks)]


def agree(what: str, value: object, ranks: Ranks, fix: str) -> None:
    """Raise the same MismatchError on all `ranks` unless all of them pass an equal JSON `value`.

    Costs one small collective when they agree: digests travel, the values only after a difference.
    """
    count = len(ranks)
    if count == 1:
        return
    text = json.dumps(value, sort_keys=True)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    digests = all_to_all(torch.tensor([digest] * count), [1] * count, [1] * count, ranks).tolist()
    if len(set(digests)) == 1:
        return
    texts = [data.decode() for data in gather_bytes(text.encode(), ranks)]
    by_text: dict[str, list[int]] = {}
    for member, said in zip(ranks, _differences(texts), strict=True):
        by_text.setdefault(said, []).append(member)
    lines = [f"  rank {', '.join(map(str, who))}: {said}" for said, who in by_text.items()]
    raise MismatchError(f"Ranks disagree on {what}:\n" + "\n".join(lines) + f"\n  Fix: {fix}")


def _differences(texts: list[str]) -> list[str]:
    """JSON texts without what all of them say, where all are objects."""
    values = [json.loads(text) for text in texts]
    if not all(isinstance(value, dict) for value in values):
        return texts
    keys = sorted({key for value in values for key in value})
    differ = [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]
    return [json.dumps({key: value.get(key) for key in differ}) for value in values]


# ---- torch.distributed ------------------------------------------------------------------------------------

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
_groups: dict[Ranks, dist.ProcessGroup] = {}
_device_meshes: dict[Mesh, DeviceMesh] = {}


class _TorchTransport:  # a Transport by shape: rank and world_size are asked of torch
    """The default process group of this process, and the groups of the device meshes it was shown."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
        out = send.new_empty(sum(recv_counts))
        group = self._group(ranks)
        if group is None:
            self._point_to_point(out, send, send_counts, recv_counts, ranks)
        else:
            wire_out, wire_send = _wire(out), _wire(send.contiguous())
            dist.all_to_all_single(wire_out, wire_send, list(recv_counts), list(send_counts), group=group)
        return out

    def all_reduce(self, local: Tensor, reduce_op: str, ranks: Ranks) -> Tensor:
        group = self._group(ranks)
        if group is not None and local.dtype not in _NOT_REDUCED_BY_GLOO:
            out = local.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(out, _OPS[reduce_op], group=group)
            return out
        count = len(ranks)
        flat = local.reshape(-1)
        pieces = self.all_to_all(flat.repeat(count), [flat.numel()] * count, [flat.numel()] * count, ranks)
        return reduce_stack(pieces.view(count, *local.shape), reduce_op)

    def draw_seed(self) -> int:
        return draw_from_torch()

    def _group(self, ranks: Ranks) -> dist.ProcessGroup | None:
        if len(ranks) == dist.get_world_size() and ranks == tuple(range(len(ranks))):
            return dist.group.WORLD
        return _groups.get(ranks)

    def _point_to_point(
        self, out: Tensor, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks
    ) -> None:
        """Ranks that share no process group talk pairwise, so that no group has to be made on the way."""
        here, ops = self.rank, []
        pieces = zip(ranks, send.contiguous().split(list(send_counts)), out.split(list(recv_counts)), strict=True)
        for peer, outgoing, incoming in pieces:
            if peer == here:
                incoming.copy_(outgoing)
                continue
            if outgoing.numel():
                ops.append(dist.P2POp(dist.isend, _wire(outgoing), peer))
            if incoming.numel():
                ops.append(dist.P2POp(dist.irecv, _wire(incoming), peer))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


_NOT_REDUCED_BY_GLOO = {torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64}


def _wire(x: Tensor) -> Tensor:
    """The same memory in a dtype that every backend can carry."""
    if x.dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.uint8, torch.int8):
        return x
    return x.view(torch.uint8) if x.element_size() == 1 else _as_bytes(x)


def _as_bytes(x: Tensor) -> Tensor:
    if x.element_size() == 16:  # complex128: one row an element, so that split sizes still count elements
        return x.view(torch.int64).view(x.numel(), 2)
    return x.view({2: torch.float16, 4: torch.int32, 8: torch.int64}[x.element_size()])


class _SoloTransport:
    """One rank that needs nobody: scripts without a launcher run unchanged."""

    rank = 0
    world_size = 1

    def all_to_all(self, send: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], ranks: Ranks) -> Tensor:
        raise AssertionError("a group of one rank exchanges nothing")

    def all_reduce(self, local: Tensor, reduce_op: str, ranks: Ranks) -> Tensor:
        raise AssertionError("a group of one rank reduces nothing")

    def draw_seed(self) -> int:
        return draw_from_torch()


_TORCH, _SOLO = _TorchTransport(), _SoloTransport()


def draw_from_torch() -> int:
    """A seed from torch's default CPU generator; `torch.manual_seed` and its saved states govern it."""
    return int(torch.randint(2**62, (), dtype=torch.int64).item())


def reduce_stack(stack: Tensor, reduce_op: str) -> Tensor:
    """Reduce the first dim of `stack` in its order, so that every rank computes the same bits."""
    match reduce_op:
        case "sum":
            return stack.any(0) if stack.dtype == torch.bool else stack.sum(0, dtype=stack.dtype)
        case "max":
            return stack.amax(0)
        case "min":
            return stack.amin(0)
        case "product":
            return stack.prod(0, dtype=stack.dtype)
    raise AssertionError(f"unknown reduction {reduce_op}")


# ---- meshes and worlds ------------------------------------------------------------------------------------


def as_mesh(mesh: Mesh | DeviceMesh) -> Mesh:
    """The plain value of a torch DeviceMesh; its process groups are remembered for these ranks.

    Raises:
        MeshError: the mesh names ranks that this world does not have.
    """
    if isinstance(mesh, Mesh):
        return _checked(mesh)
    value = _values.get(id(mesh))
    if value is None or _device_meshes.get(value) is not mesh:
        names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
        value = Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), names, mesh.device_type)
        _checked(value)
        _values[id(mesh)] = value
        _device_meshes[value] = mesh
        if value.coordinate(rank()) is not None:
            for axis in range(value.ndim):
                _groups.setdefault(tuple(sorted(value.line(rank(), axis))), mesh.get_group(axis))
    return value


_values: dict[int, Mesh] = {}


@cache
def _fits(mesh: Mesh, world: int) -> bool:
    return max(mesh.ranks) < world


def _checked(mesh: Mesh) -> Mesh:
    world = world_size()
    if not _fits(mesh, world):
        raise MeshError(
            f"{mesh} needs rank {max(mesh.ranks)}, but this world has {world} rank{'s' if world > 1 else ''}. "
            f"Fix: start at least {max(mesh.ranks) + 1} ranks, or make a smaller mesh."
        )
    return mesh


def device_mesh(mesh: Mesh) -> Mesh | DeviceMesh:
    """The torch DeviceMesh that `mesh` was made from, or `mesh` itself."""
    return _device_meshes.get(mesh, mesh)


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> Any:
    """A mesh of all ranks: torch's DeviceMesh where processes run, a plain `Mesh` on simulated ranks.

    Args:
        device_type: "cpu", "cuda", ….
        mesh_shape: positions of each axis.
        mesh_dim_names: one name an axis.

    Raises:
        MeshError: the shape needs more ranks than the world has.
    """
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    mesh = _checked(Mesh(tuple(mesh_shape), (), names, device_type))
    if _here.transport is not None or not dist.is_initialized():
        return mesh
    if mesh.size() != world_size():
        return DeviceMesh(device_type, torch.arange(mesh.size()).view(mesh.shape), mesh_dim_names=names)
    return torch_init_device_mesh(device_type, mesh.shape, mesh_dim_names=names)


def init_processes(rank: int, world_size: int, store: str, timeout_seconds: float = 60.0) -> None:
    """Join the gloo world whose members meet in the file `store`; no port is opened for the meeting."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


def init_from_environment(timeout_seconds: float = 60.0) -> bool:
    """Join the world that torchrun describes in the environment; False where there is none."""
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return dist.is_initialized()
    dist.init_process_group(timeout=timedelta(seconds=timeout_seconds))
    return True


def shutdown() -> None:
    """Leave the world, if this process joined one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _groups.clear()
    _device_meshes.clear()
    _values.clear()


def barrier(ranks: Ranks) -> None:
    """Return once every rank of `ranks` has come here."""
    all_to_all(torch.zeros(len(ranks), dtype=torch.uint8), [1] * len(ranks), [1] * len(ranks), ranks)
