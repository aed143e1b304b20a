"""Plans of modules as Python code and as TOML, with the options that differ from their defaults."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from shardwise._layout import Mesh, Placement
from shardwise._layout.parse import parse_mesh, parse_placement
from shardwise.errors import PlanError, ShardwiseError, did_you_mean
from shardwise.parallel import (
    ColwiseParallel,
    ExpertParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

Entry = ParallelStyle | Placement
STYLES = {
    style.__name__: style
    for style in (
        ColwiseParallel, ExpertParallel, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput,
        RowwiseParallel, SequenceParallel,
    )
}  # fmt: skip


def options_of(style: ParallelStyle) -> dict[str, Any]:
    """The options of a style that differ from their defaults."""
    found = {}
    for option in fields(style):
        value = getattr(style, option.name)
        if option.default is MISSING or value != option.default:
            found[option.name] = value
    return found


def entry_text(entry: Entry) -> str:
    """The entry as Python code."""
    if isinstance(entry, Placement):
        return str(entry)
    options = ", ".join(f"{name}={value!r}" for name, value in options_of(entry).items())
    return f"{type(entry).__name__}({options})"


def code_of(
    mesh: Mesh, styles: Mapping[str, Entry], units: tuple[str, ...], reshard: bool, experts: Sequence[str] = ()
) -> str:
    """Python code that applies a plan to `model`; units of `experts` are sharded along the first axis only."""
    entries = {key: entry_text(entry) for key, entry in styles.items()}
    text = " ".join(entries.values())
    placements = [name for name in ("Partial", "Replicate", "Shard") if f"{name}(" in text]
    names = sorted({type(e).__name__ for e in styles.values() if isinstance(e, ParallelStyle)} | {"parallelize_module"}
                   | ({"fully_shard"} if units else set()))  # fmt: skip
    named = "" if mesh.names is None else f", names={mesh.names!r}"
    tensor, data = ("mesh", "mesh") if mesh.ndim == 1 else [
        f"mesh[{mesh.names[axis]!r}]" if mesh.names else f"mesh.submesh(({axis},), rank())" for axis in (1, 0)
    ]  # fmt: skip
    lines = [
        f"from shardwise import {', '.join(['Mesh', *placements, *['rank'] * ('rank()' in data)])}",
        f"from shardwise.parallel import {', '.join(names)}",
        "",
        f"mesh = Mesh({mesh.shape!r}{named})",
        "plan = {",
        *(f"    {json.dumps(key)}: {code}," for key, code in entries.items()),
        "}",
        f"parallelize_module(model, {tensor}, plan)",
    ]
    everyone = f"Mesh({(mesh.size(),)!r})" if experts else data
    for paths, along in ((list(experts), data), ([unit for unit in units if unit not in experts], everyone)):
        if paths:
            lines += [
                f"for path in {paths!r}:",
                f"    fully_shard(model.get_submodule(path), mesh={along}, reshard_after_forward={reshard})",
            ]
    return "\n".join(lines) + "\n"


# ---- TOML -----------------------------------------------------------------------------------------------------------


def toml_of(format_name: str, mesh: Mesh, styles: Mapping[str, Entry], units: tuple[str, ...], reshard: bool) -> str:
    """A plan as TOML: the mesh, the units of `fully_shard` and their option, and a line for each entry."""
    axes = mesh.names or tuple(map(str, range(mesh.ndim)))
    shape = ",".join(f"{name}={n}" if mesh.names else str(n) for name, n in zip(axes, mesh.shape, strict=True))
    lines = [f"format = {json.dumps(format_name)}", f"mesh = {json.dumps(shape)}", f"units = {json.dumps(list(units))}",
             f"reshard = {json.dumps(reshard)}"]  # fmt: skip
    lines += ["", "[plan]", *(f"{json.dumps(key)} = {_value(_tree(entry))}" for key, entry in styles.items())]
    return "\n".join(lines) + "\n"


def _tree(value: object) -> object:
    """An entry or an option in types of TOML; None is in no table."""
    if isinstance(value, Placement):
        return str(value)
    if isinstance(value, ParallelStyle):
        return {"style": type(value).__name__, **{name: _tree(x) for name, x in options_of(value).items()}}
    if isinstance(value, Mapping):
        return {name: _tree(x) for name, x in value.items()}
    return [_tree(x) for x in value] if isinstance(value, list | tuple) else value


def _value(tree: object) -> str:
    if isinstance(tree, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_value(x)}" for name, x in tree.items()) + " }"
    return "[" + ", ".join(map(_value, tree)) + "]" if isinstance(tree, list) else json.dumps(tree)


KEYS = {"format": str, "mesh": str, "units": list, "reshard": bool, "plan": dict}


def plan_of_toml(format_name: str, content: Mapping[str, Any]) -> tuple[Mesh, dict[str, Entry], tuple[str, ...], bool]:
    """The arguments of `toml_of` from the content of a file.

    Raises:
        PlanError, MeshError: the first error in the file.
    """
    if content.get("format") != format_name:
        raise PlanError(f"format is {content.get('format')!r}. Fix: a file with format = {format_name!r}.")
    for key in content:
        if key not in KEYS:
            raise PlanError(f"{key!r} is not a key of a plan.{did_you_mean(key, KEYS)} Fix: use {', '.join(KEYS)}.")
    for key, kind in KEYS.items():
        if not isinstance(content.get(key), kind):
            raise PlanError(f"{key} is {content.get(key)!r}, expected {kind.__name__}. Fix: a file of `save`.")
    mesh, units, entries = parse_mesh(content["mesh"]), tuple(content["units"]), {}
    if mesh.ndim > 2 or not all(isinstance(unit, str) for unit in units):
        raise PlanError(f"units {list(units)} on {mesh}. Fix: paths of modules, on a mesh of one or two axes.")
    for key, tree in content["plan"].items():
        try:
            entries[key] = entry_of_toml(tree)
        except ShardwiseError as error:
            raise PlanError(f"{key}: {error}") from error
    return mesh, entries, units, content["reshard"]


def entry_of_toml(tree: object) -> Entry:
    """The entry of a line.

    Raises:
        PlanError: an unknown style, option or placement.
    """
    if isinstance(tree, str):
        return parse_placement(tree)
    if not isinstance(tree, dict) or "style" not in tree:
        raise PlanError(f"{tree!r} is neither a placement nor a style. Fix: such as {{ style = 'ColwiseParallel' }}.")
    name = str(tree["style"])
    if name not in STYLES:
        raise PlanError(f"There is no style {name!r}.{did_you_mean(name, STYLES)} Fix: one of {', '.join(STYLES)}.")
    known = {option.name for option in fields(STYLES[name])}
    options: dict[str, Any] = {key: _option(value) for key, value in tree.items() if key != "style"}
    if unknown := sorted(set(options) - known):
        raise PlanError(f"{name} has no option {unknown[0]!r}.{did_you_mean(unknown[0], known)} Fix: leave it out.")
    style: ParallelStyle = STYLES[name](**options)
    return style


def _option(value: object) -> object:
    if isinstance(value, str):
        return parse_placement(value)
    if isinstance(value, dict):
        return {name: _option(x) for name, x in value.items()}
    return tuple(map(_option, value)) if isinstance(value, list) else value
