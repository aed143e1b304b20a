"""From a plan, which names modules by path or glob, to what becomes of each module. Pure: nothing changes here."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from shardwise.errors import LayoutError, MeshError, PlanError
from shardwise.layout import REPLICATE, Layout, Mesh
from shardwise.parallel.boundary import Scope
from shardwise.parallel.shard_module import torn_ties
from shardwise.parallel.styles import After, Before, ParallelStyle, Where

Plan = ParallelStyle | Mapping[str, "Plan"]
STYLES = "_parallel_styles"  # of a module: the styles that were applied to it


class Styled(NamedTuple):
    """What becomes of the calls of one module."""

    path: str
    module: nn.Module
    style: ParallelStyle
    before: Before | None
    after: After | None


class Resolved(NamedTuple):
    """All that a plan comes to: layouts of parameters by name, calls of modules, and the forwards that share inputs."""

    layouts: dict[str, Layout]
    styled: list[Styled]
    scopes: list[tuple[nn.Module, Scope]]


def axis_of(mesh: Mesh) -> int:
    """The axis that styles speak of: "tp", else the last."""
    return mesh.axis("tp") if mesh.names and "tp" in mesh.names else mesh.ndim - 1


def flattened(plan: Plan, prefix: str = "") -> Iterator[tuple[str, ParallelStyle]]:
    """Keys, with those of nested plans behind those of the plans around them, and styles.

    Raises:
        PlanError: something that is neither a style nor a plan.
    """
    if isinstance(plan, ParallelStyle):
        yield prefix, plan
    elif isinstance(plan, Mapping):
        for key, inner in plan.items():
            if not isinstance(key, str):
                raise PlanError(
                    f"A plan has paths of modules as keys, got {key!r}. Fix: a string such as 'layers.*.w1'."
                )
            yield from flattened(inner, ".".join(part for part in (prefix, key) if part))
    else:
        where = f" for {prefix!r}" if prefix else ""
        raise PlanError(
            f"A plan is a ParallelStyle, or a dict of paths to styles or plans; got {plan!r}{where}. "
            f"Fix: a style such as ColwiseParallel() — with its parentheses."
        )


def resolve(module: nn.Module, plan: list[tuple[str, ParallelStyle]], mesh: Mesh) -> Resolved:
    """What the plan comes to.

    Raises:
        PlanError: every key that matches nothing and every style that does not fit, in one message.
    """
    problems: list[str] = []
    layouts: dict[str, Layout] = {}
    styled: list[Styled] = []
    scopes: dict[str, tuple[nn.Module, Scope]] = {}
    done: dict[int, list[ParallelStyle]] = {}
    for key, style in plan:
        found = list(_matches(module, key.split(".") if key else []))
        if not found:
            problems.append(_unknown(key, module))
        for path, child in found:
            if style in done.setdefault(id(child), []):
                continue  # a module that stands in several places, or that several globs name alike
            done[id(child)].append(style)
            try:
                one, own = _styled(path, child, style, mesh, module, scopes)
            except (PlanError, LayoutError, MeshError) as error:
                problems.append(f"  {path or 'the module'}: {error}")
                continue
            styled.append(one)
            for name, layout in own.items():
                if layouts.setdefault(name, layout) != layout:
                    problems.append(f"  {name}: two styles want it as {layouts[name]} and as {layout}.")
    problems += torn_ties(dict(module.named_parameters(remove_duplicate=False)), layouts)
    if problems:
        raise PlanError("The plan does not fit the module:\n" + "\n".join(dict.fromkeys(problems)))
    return Resolved(layouts, styled, list(scopes.values()))


def _matches(module: nn.Module, parts: list[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules whose path fits the globs, one for every component of a path."""
    if not parts:
        yield path, module
        return
    for name, child in module._modules.items():
        if child is not None and fnmatchcase(name, parts[0]):
            yield from _matches(child, parts[1:], f"{path}.{name}" if path else name)


def _unknown(key: str, module: nn.Module) -> str:
    paths = [path for path, _ in module.named_modules(remove_duplicate=False) if path]
    close = get_close_matches(key, paths, n=1) or [p for p in paths if p.rpartition(".")[2] == key.rpartition(".")[2]]
    few = ", ".join(paths[:12]) + (", …" if len(paths) > 12 else "")
    hint = f"Did you mean {close[0]!r}?" if close else f"Modules: {few or 'none'}."
    return f"  {key!r} matches no module. {hint}"


def _styled(
    path: str,
    module: nn.Module,
    style: ParallelStyle,
    mesh: Mesh,
    root: nn.Module,
    scopes: dict[str, tuple[nn.Module, Scope]],
) -> tuple[Styled, dict[str, Layout]]:
    """What `style` says about the module at `path`: its calls, and the layouts of its parameters."""
    parent = path.rpartition(".")[0]
    scope = scopes[parent][1] if parent in scopes else Scope()
    where = Where(path, mesh, axis_of(mesh), scope)
    before, after = style.before(module, where), style.after(module, where)
    if before is not None and path:
        scopes.setdefault(parent, (root.get_submodule(parent), scope))
    return Styled(path, module, style, before, after), _layouts(path, module, style, where)


def _layouts(path: str, module: nn.Module, style: ParallelStyle, where: Where) -> dict[str, Layout]:
    wanted = dict(style.parameters(module, where))
    if not wanted:
        return {}
    if any(other.parameters(module, where) for other in getattr(module, STYLES, ())):
        raise PlanError("it was parallelised before. Fix: one plan that names it once.")
    have = dict(module.named_parameters(remove_duplicate=False))
    absent = {name for name, parameter in module._parameters.items() if parameter is None}  # such as a bias
    if unknown := [name for name in wanted if name not in have and name not in absent]:
        raise PlanError(f"{type(style).__name__} cuts {', '.join(unknown)}, the parameters are {', '.join(have)}.")
    return {
        f"{path}.{name}" if path else name: where.layout(wanted.get(name, REPLICATE), parameter.shape)
        for name, parameter in have.items()
    }
