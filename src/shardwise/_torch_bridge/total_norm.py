"""The total norm for gradient clipping: over all DTensors of a mesh in one exchange, and over nested meshes.

Ranks with other parameters on their own meshes would clip shared ones by different factors: an error.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import _collectives as collectives
from shardwise._layout import Mesh
from shardwise._tensor.dispatch.operands import is_outside
from shardwise._tensor.dtensor import DTensor, tag
from shardwise._tensor.handlers.lists import exchange_groups, norms_of, of_numbers
from shardwise.errors import MismatchError


def total_norm_in_one_exchange(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.nn.utils.get_total_norm` without a DTensor for each tensor's norm."""

    @wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *args: object, **kwargs: object) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if _on_nested_meshes(tensors):
            total = _norm_over_meshes(tensors, float(norm_type))
            return original([total], norm_type or torch.inf, *args, **kwargs)
        match exchange_groups(tensors):
            case [(mesh, members)] if len(members) == len(tensors) and not any((*args, *kwargs.values())):
                total = torch.linalg.vector_norm(norms_of(tensors, float(norm_type)), float(norm_type))
                return tag(total, of_numbers(mesh))
        return original(tensors, norm_type, *args, **kwargs)

    return total_norm


def _on_nested_meshes(tensors: Sequence[Any]) -> bool:
    """Whether all are DTensors, some on one mesh and others on meshes within it, and every rank is in all meshes.

    An example is `fully_shard` on `mesh["dp"]` with some parameters that are DTensors on `mesh["tp"]`. Ranks see other
    meshes than their neighbors, so they decide together.
    """
    if not all(type(x) is DTensor for x in tensors):
        return False
    meshes = {x._layout.mesh for x in tensors}
    if len(meshes) < 2:
        return False
    largest = _largest(meshes)
    nested = all(set(mesh.ranks) <= set(largest.ranks) and not is_outside(mesh) for mesh in meshes)
    with DisableTorchFunctionSubclass():
        refused = torch.tensor(float(not nested), device=tensors[0].device)
    return not collectives.all_reduce(refused, "max", largest.sorted_ranks).item()


def _norm_over_meshes(tensors: Sequence[DTensor], norm_type: float) -> DTensor:
    """The total norm; each rank counts tensors on its meshes. Replicated on the largest.

    Raises:
        MismatchError: ranks have different norms, so they would clip replicas differently.
    """
    largest = _largest({x._layout.mesh for x in tensors})
    rows = [norms_of([tensors[i] for i in members], norm_type) for _, members in exchange_groups(tensors)]
    total = torch.linalg.vector_norm(torch.cat(rows), norm_type) if rows else torch.zeros((), device=tensors[0].device)
    most, least = collectives.all_reduce(torch.stack([total, -total]), "max", largest.sorted_ranks)
    if bool(most + least > most * torch.finfo(total.dtype).eps ** 0.5):
        raise MismatchError(
            f"The total norm of tensors on several meshes must be the same on all ranks of {largest}. It is "
            f"{-least.item():.6g} on one rank and {most.item():.6g} on another. "
            f"Fix: clip tensors that only some ranks have in a call of their own."
        )
    return tag(most, of_numbers(largest))


def _largest(meshes: Iterable[Mesh]) -> Mesh:
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim))
