"""`parallelize_module`: a plan, resolved and then applied."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise import collectives
from shardwise.errors import MeshError, PlanError
from shardwise.layout import Mesh
from shardwise.parallel.plan import STYLES, Plan, Styled, flattened, resolve
from shardwise.parallel.shard_module import lay_out
from shardwise.parallel.styles import After, Before, ParallelStyle
from shardwise.tensor.dtensor import default_mesh


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Cut the parts of `module` as a plan of styles says, in place.

    The whole plan is checked, and compared between ranks, before anything changes. Modules that it does not name stay
    as they are. Parameters become new objects: make the optimizer afterwards. Tied parameters stay one. A module on
    the meta device is materialised part by part by its `reset_parameters()`.

    Args:
        module: any module, in place.
        device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks. Styles speak of its only axis, or
            of the one named "tp", else the last. The others are data axes: parameters are the same along them, and a
            plain input is this rank's part of the batch.
        parallelize_plan: a style for the module, or a dict of paths to styles or to further plans. Every component of
            a path may be a glob, such as "layers.*.attention.w[qkv]"; "" is the module itself. A module that several
            keys name gets all their styles, in order.
        src_data_rank: position in the mesh whose values count; None takes every rank's own and sends nothing.

    Returns:
        The module itself.

    Raises:
        PlanError: keys that match nothing, styles that do not fit; all of them in one message.
        MismatchError: plans or modules differ between ranks.
        MeshError: this rank is not part of the mesh.
    """
    if parallelize_plan is None:
        raise PlanError("parallelize_module needs a plan. Fix: such as {'path.of.a.module': ColwiseParallel()}.")
    device = next((p.device.type for p in module.parameters() if not p.is_meta), "cpu")
    mesh = default_mesh(device) if device_mesh is None else collectives.as_mesh(device_mesh)
    if mesh.coordinate(collectives.rank()) is None:
        raise MeshError(f"Rank {collectives.rank()} is not part of {mesh}. Fix: parallelise on its ranks only.")
    plan = list(flattened(parallelize_plan))
    _agree(module, plan, mesh, src_data_rank)
    found = resolve(module, plan, mesh)
    lay_out(module, found.layouts, src_data_rank)
    for parent, scope in found.scopes:
        parent.register_forward_pre_hook(scope.open)
        parent.register_forward_hook(scope.close, always_call=True)
    for styled in found.styled:
        _attach(styled)
    return module


def _agree(module: nn.Module, plan: list[tuple[str, ParallelStyle]], mesh: Mesh, src_data_rank: int | None) -> None:
    """Before anything else, so that a plan that is wrong on one rank only is the same error on all."""
    said: dict[str, object] = {
        f"parameter {name}": f"{p.dtype} {tuple(p.shape)}"
        for name, p in module.named_parameters(remove_duplicate=False)
    }
    said |= {"mesh": str(mesh), "src_data_rank": src_data_rank, "plan": [[key, _words(style)] for key, style in plan]}
    collectives.agree(
        "the parallel plan", said, tuple(sorted(mesh.ranks)), "build the same module and plan on every rank."
    )


def _words(style: ParallelStyle) -> str:
    """A style as it prints, unless that tells an address, which differs from rank to rank."""
    words = repr(style)
    return type(style).__name__ if " at 0x" in words else words


def _attach(styled: Styled) -> None:
    module, before, after = styled.module, styled.before, styled.after
    if before is not None:
        module.register_forward_pre_hook(_BeforeForward(before), with_kwargs=True)
    if after is not None:
        module.register_forward_hook(_AfterForward(after))
    module.__dict__.setdefault(STYLES, []).append(styled.style)


@dataclass(slots=True)
class _BeforeForward:
    """A hook as torch calls it. No closure, so that a copy of the module shares inputs as the module does."""

    before: Before

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.before(args, kwargs)


@dataclass(slots=True)
class _AfterForward:
    """The same, of results."""

    after: After

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.after(output)
