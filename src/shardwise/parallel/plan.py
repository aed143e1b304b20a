"""`parallelize_module`: applies a plan of styles of modules and placements of parameters, by path or glob."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import DeviceMesh
from shardwise._layout import REPLICATE, Layout, Mesh, Placement, checked, describe, placement_of, shown
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor.transforms import refuse_compilation
from shardwise._torch_bridge import module_sharding
from shardwise.errors import LayoutError, MeshError, PlanError
from shardwise.parallel.boundary import SharedInput
from shardwise.parallel.styles import SHARDS_BATCH, InputFn, ModuleContext, OutputFn, ParallelStyle, misused_style

M = TypeVar("M", bound=nn.Module)
ParallelPlan = ParallelStyle | Placement | Mapping[str, "ParallelPlan"]
"""A style for a module, a placement for a parameter, or plans of submodules by name or glob."""
Entries = Sequence[tuple[str, ParallelStyle | Placement]]
describe(ParallelStyle, None)  # `flattened` refuses what is not a plan, and says which entry
APPLIED = "_parallel_styles"  # attribute of a module: the styles that were applied to it


@checked
def parallelize_module(
    module: M,
    device_mesh: Mesh | DeviceMesh | None = None,
    parallelize_plan: ParallelPlan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> M:
    """Parallelise submodules of `module` as a plan of styles says, in place.

    The full plan is checked, and compared between ranks, before anything changes. Modules that it does not name stay
    unchanged. Parameters become new objects: make the optimizer afterwards. Tied parameters stay tied. Submodules on
    the meta device are materialised one by one by their `reset_parameters()`.

    Args:
        module: any module, in place.
        device_mesh: a `Mesh` or torch's `DeviceMesh`; None is one axis of all ranks. Styles refer to its only axis, or
            to the one named "tp", else to the last. The others are data axes: parameters are replicated along them,
            and a plain input is this rank's shard of the batch.
        parallelize_plan: a style for the module, or a dict of paths to styles or nested plans. Every component of a
            path may be a glob, such as `layers.*.attention.w[qkv]`; `**` is any number of components; "" is the module
            itself. A module that several keys name gets all their styles, in order. A path with a placement names
            parameters, such as `layers.*.experts.w1`: it is that on the tensor-parallel axis, and nothing else changes.
        src_data_rank: index in the mesh of the rank whose values are used, also of plain buffers beside the parameters;
            None uses the values of every rank and sends nothing.

    Returns:
        The module.

    Raises:
        PlanError: keys that match nothing, styles that do not fit; all of them in one message. Or torch's
            `parallelize_module` left hooks.
        MismatchError: plans or modules differ between ranks.
        MeshError: this rank is not part of the mesh.
    """
    if parallelize_plan is None:
        raise PlanError("parallelize_module needs a plan. Fix: such as {'path.of.a.module': ColwiseParallel()}.")
    module_sharding.refuse_torch_hooks(module)
    mesh = module_sharding.module_mesh(module, device_mesh)
    if mesh.coordinate(collectives.rank()) is None:
        raise MeshError(f"Rank {collectives.rank()} is not part of {mesh}. Fix: parallelise on its ranks only.")
    plan = list(flattened(parallelize_plan))
    named = module_sharding.named_parameters(module)
    module_sharding.agree_on_plan(plan, named, mesh.ranks, mesh=str(mesh), src_data_rank=src_data_rank)
    resolved = resolve(module, plan, mesh)
    module_sharding.replace_parameters(module, resolved.layouts, src_data_rank)
    owners = [module.get_submodule(name.rpartition(".")[0]) for name in resolved.layouts]
    module_sharding.share_buffers(owners, mesh, src_data_rank)
    for parent, shared in resolved.shared:
        parent.register_forward_pre_hook(shared.open)
        parent.register_forward_hook(shared.close, always_call=True)
    for styled in resolved.styled:
        _apply(styled)
    return module


def _apply(styled: "StyledModule") -> None:
    module = styled.module
    if styled.input_fn is not None:
        module.register_forward_pre_hook(partial(_pre_hook, styled.input_fn), with_kwargs=True)
    if styled.forward_fn is not None:
        vars(module)["forward"] = styled.forward_fn
    if styled.output_fn is not None:
        module.register_forward_hook(partial(_hook, styled.output_fn))
    module.__dict__.setdefault(APPLIED, []).append(styled.style)
    for parameter in module.parameters() if styled.shards_batch else ():
        vars(parameter)[SHARDS_BATCH] = True


# Hooks are partials of these: a copy of the module then has its own copy of the shared input, too.


def _pre_hook(input_fn: InputFn, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    refuse_compilation()
    return input_fn(args, kwargs)


def _hook(output_fn: OutputFn, module: nn.Module, args: Args, output: object) -> Any:
    refuse_compilation()
    return output_fn(output)


class StyledModule(NamedTuple):
    """A style, and its functions for one module."""

    module: nn.Module
    style: ParallelStyle
    input_fn: InputFn | None
    forward_fn: Callable[..., Tensor] | None
    output_fn: OutputFn | None
    shards_batch: bool


class ResolvedPlan(NamedTuple):
    """Layouts of parameters by name, styled modules, and modules whose children share inputs."""

    layouts: dict[str, Layout]
    styled: list[StyledModule]
    shared: list[tuple[nn.Module, SharedInput]]


def tensor_parallel_axis(mesh: Mesh) -> int:
    """The axis that styles refer to: "tp", else the last."""
    return mesh.axis("tp") if mesh.names and "tp" in mesh.names else mesh.ndim - 1


def flattened(plan: ParallelPlan, prefix: str = "") -> Iterator[tuple[str, ParallelStyle | Placement]]:
    """Paths with styles or placements; the keys of nested plans follow those of the plans around them.

    Raises:
        PlanError: something that is none of them.
    """
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif prefix and (placement := placement_of(plan)) is not None:
        yield prefix, placement
    elif isinstance(plan, Mapping):
        for key, inner in plan.items():
            if not isinstance(key, str):
                raise PlanError(
                    f"A plan has paths of modules as keys, got {key!r}. Fix: a string such as 'layers.*.w1'."
                )
            yield from flattened(inner, ".".join(component for component in (prefix, key) if component))
    else:
        key = f" for {prefix!r}" if prefix else ""
        raise PlanError(
            f"A plan is a ParallelStyle, or a dict of paths of modules to styles or plans, and of parameters to "
            f"placements; got {shown(plan)}{key}. Fix: {misused_style(plan) or 'a style such as ColwiseParallel()'}."
        )


def resolve(module: nn.Module, plan: Entries, mesh: Mesh) -> ResolvedPlan:
    """The effect of the plan on each module and parameter; changes nothing.

    Raises:
        PlanError: every key that matches nothing and every style or placement that does not fit, in one message.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    styles = [(key, entry) for key, entry in plan if isinstance(entry, ParallelStyle)]
    placements = [(key, entry) for key, entry in plan if not isinstance(entry, ParallelStyle)]
    named = module_sharding.named_parameters(module)
    names, axis = module_sharding.names_of_each(named), tensor_parallel_axis(mesh)
    matched, problems = module_sharding.resolve(dict(styles), list(modules), "module", list(named))
    matched_names, unmatched = module_sharding.resolve(dict(placements), list(named), "parameter", list(modules))
    problems += unmatched
    layouts: dict[str, Layout] = {}
    shared: dict[str, tuple[nn.Module, SharedInput]] = {}
    applied: dict[int, list[ParallelStyle]] = {}
    styled: list[StyledModule] = []

    @contextmanager
    def collected(called: str, found: dict[str, Layout]) -> Iterator[None]:
        """Add what is found inside, or the error."""
        try:
            yield
        except (PlanError, LayoutError, MeshError) as error:
            problems.append(f"{called}: {error}")
        for name, layout in found.items():
            if layouts.setdefault(name, layout) != layout:
                problems.append(
                    f"{name}: two entries give it the layouts {layouts[name]} and {layout}. Fix: one entry."
                )

    for key, placement in placements:
        for name in matched_names[key]:
            with collected(module_sharding.label(names[name]), found := dict[str, Layout]()):
                if placement.is_partial():
                    raise LayoutError(f"a parameter cannot be {placement}. Fix: Shard(dim) or Replicate().")
                found[name] = ModuleContext("", mesh, axis).layout(placement, named[name].shape)
    for key, style in styles:
        for path in matched[key]:
            child, parent = modules[path], path.rpartition(".")[0]
            if style in applied.setdefault(id(child), []):
                continue  # a shared module, or one that several globs match
            applied[id(child)].append(style)
            shared_input = shared[parent][1] if parent in shared else SharedInput()
            context = ModuleContext(path, mesh, axis, shared_input, type(style).__name__)
            with collected(path or "the module", found := dict[str, Layout]()):
                input_fn, forward_fn = style.input_fn(child, context), style.forward_fn(child, context)
                output_fn = style.output_fn(child, context)
                if input_fn is not None and path:
                    shared.setdefault(parent, (modules[parent], shared_input))
                found |= _layouts(child, style, context)
                styled.append(StyledModule(child, style, input_fn, forward_fn, output_fn, style.shards_batch(context)))
    module_sharding.refuse([*problems, *module_sharding.conflicting_ties(named, layouts)])
    return ResolvedPlan(layouts, styled, list(shared.values()))


def _layouts(module: nn.Module, style: ParallelStyle, context: ModuleContext) -> dict[str, Layout]:
    placements = dict(style.parameters(module, context))
    if not placements:
        return {}
    if any(other.parameters(module, context) for other in getattr(module, APPLIED, ())):
        raise PlanError("it was parallelised before. Fix: one plan that names it once.")
    named = module_sharding.named_parameters(module)
    absent = {
        name for name, parameter in module._parameters.items() if parameter is None
    }  # a missing bias, for example
    if unknown := [name for name in placements if name not in named and name not in absent]:
        raise PlanError(
            f"{type(style).__name__} shards {', '.join(unknown)}, the parameters are {', '.join(named)}. "
            f"Fix: names of these in its parameters()."
        )
    prefix = f"{context.path}." if context.path else ""
    return {f"{prefix}{name}": context.layout(placements.get(name, REPLICATE), p.shape) for name, p in named.items()}
