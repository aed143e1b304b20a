"""One call in many layouts: arguments as DTensors, in every combination of placements."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise._collectives import DeviceMesh, as_mesh
from shardwise._layout import REPLICATE, Layout, Mesh, Partial, Placement, Shard, checked_init
from shardwise.errors import LayoutError
from shardwise.testing.local_shards import dtensor_from_full

Placements = tuple[Placement, ...]


@checked_init
@dataclass(eq=False)
class DTensorConverter:
    """Converts the arguments of a call to DTensors, once for every combination of placements of its tensors.

    ```
    for d_args, d_kwargs in DTensorConverter(mesh, args, kwargs):
        torch.testing.assert_close(op(*d_args, **d_kwargs).full_tensor(), op(*args, **kwargs))
    ```

    By default the placements are those of torch's converter: Replicate, and even shards of each dim. On a mesh with
    several axes each axis has these choices, and all combinations that are layouts are tried.

    Args:
        mesh: a `Mesh` or torch's `DeviceMesh`.
        args, kwargs: of the call; tensors in lists, tuples and dicts are found. All ranks pass equal values.
        replicate_only: only Replicate.
        uneven: also uneven shards, none of them empty: torch's, and one of explicit sizes.
        empty: also layouts with empty shards: torch's, and all rows on the last rank.
        partial: also `Partial`: local tensors that add up to the value, for floating and complex tensors.
        bools: also shard boolean tensors.

    Attributes:
        hit: number of tensors converted so far.
        miss: number of tensors that cannot be converted: sparse, quantised, nested, conjugated or negated views, on the
            meta device, or of another subclass of Tensor.
        placements: of each tensor in the present combination, for error messages.
    """

    mesh: Mesh | DeviceMesh
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    replicate_only: bool = False
    _: KW_ONLY
    uneven: bool = False
    empty: bool = False
    partial: bool = False
    bools: bool = False
    placements: tuple[Placements, ...] = field(default=(), init=False)
    hit: int = field(default=0, init=False)
    miss: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.mesh = as_mesh(self.mesh)
        self._leaves, self._tree = pytree.tree_flatten((self.args, dict(self.kwargs)))
        tensors = [x for x in self._leaves if isinstance(x, Tensor)]
        self.sharding_combs: Iterator[tuple[Placements, ...]] = itertools.product(*map(self.layouts_for_arg, tensors))

    def successful(self) -> bool:
        """Whether tensors were converted, and none was missed."""
        return self.hit > 0 and self.miss == 0

    def is_supported_tensor(self, t: Tensor) -> bool:
        """Whether `t` is dense, real memory, neither quantised nor a view that conjugates or negates."""
        strange = t.layout is not torch.strided or t.is_quantized or t.is_nested
        return not (strange or t.is_neg() or t.is_conj() or t.device.type in {"lazy", "meta"})

    def _can_convert(self, t: Tensor) -> bool:
        return type(t) in {Tensor, nn.Parameter} and self.is_supported_tensor(t)

    def gen_sharding_choices_for_arg(self, arg: Tensor) -> Sequence[Placement]:
        """The placements to try on one axis of the mesh."""
        choices: list[Placement] = [REPLICATE]
        if self.replicate_only:
            return choices
        if arg.dtype != torch.bool or self.bools:
            choices += (p for dim, length in enumerate(arg.shape) for p in self._shards(dim, length))
        if self.partial and (arg.is_floating_point() or arg.is_complex()):
            choices.append(Partial())
        return choices

    def _shards(self, dim: int, length: int) -> Iterator[Placement]:
        """Shards along one dim: torch's, and those of explicit sizes."""
        mesh = as_mesh(self.mesh)
        if (length > 1 and length % mesh.size() == 0) or (length and (self.uneven or self.empty)):
            yield Shard(dim)
        for positions in sorted(set(mesh.shape) - {1}):
            if self.uneven and length > positions:
                yield Shard(dim, (length - positions + 1, *[1] * (positions - 1)))
            if self.empty and length:
                yield Shard(dim, (*[0] * (positions - 1), length))

    def layouts_for_arg(self, arg: Tensor) -> Sequence[Placements]:
        """The layouts to try, one placement an axis: the combinations of the choices for axes."""
        mesh = as_mesh(self.mesh)
        if not self._can_convert(arg):
            return [(REPLICATE,) * mesh.ndim]
        found = []
        for placements in itertools.product(self.gen_sharding_choices_for_arg(arg), repeat=mesh.ndim):
            with suppress(LayoutError):  # sizes for an axis of another length
                layout = Layout(mesh, placements, tuple(arg.shape))
                held = {layout.local_shape(rank) for rank in mesh.ranks}
                if len(held) == 1 or (self.empty if any(0 in shape for shape in held) else self.uneven):
                    found.append(placements)
        return found

    def __iter__(self) -> "DTensorConverter":
        return self

    def __next__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.placements = next(self.sharding_combs)
        placements = iter(self.placements)
        made = [
            self.to_dist_tensor(x, self.mesh, next(placements)) if isinstance(x, Tensor) else x for x in self._leaves
        ]
        args, kwargs = pytree.tree_unflatten(made, self._tree)
        return args, kwargs

    def to_dist_tensor(self, t: Tensor, mesh: Mesh | DeviceMesh, placements: Sequence[Placement]) -> Tensor:
        """`t` as a DTensor, without communication, or `t` itself if impossible; counts a hit or a miss.

        Raises:
            TypeError: `t` is not a tensor.
        """
        if not isinstance(t, Tensor):
            raise TypeError(f"A tensor is wanted, to make a DTensor of; got {type(t).__name__}. Fix: torch.tensor(…).")
        if not self._can_convert(t):
            self.miss += 1
            return t
        self.hit += 1
        made = dtensor_from_full(t.detach(), Layout(as_mesh(mesh), placements, tuple(t.shape)))
        is_parameter = isinstance(t, nn.Parameter)
        return nn.Parameter(made, t.requires_grad) if is_parameter else made.requires_grad_(t.requires_grad)
