"""Turns choices into a plan of `parallelize_module`: styles of modules, and placements of the other parameters.

Layers of features get `ColwiseParallel` or `RowwiseParallel`, modules that run on a shard of the sequence
`SequenceParallel`, other redistributions at boundaries `PrepareModuleInput` and `PrepareModuleOutput`. Outputs stay
DTensors. Entries of equal blocks become globs.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardwise._layout import REPLICATE, Placement, Shard
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shardwise.parallel.styles import INPUT_FEATURES, OUTPUT_FEATURES, WEIGHT_DIMS, forward_arguments
from shardwise.plan.module_choices import Choice
from shardwise.plan.module_costs import ModuleCosts
from shardwise.plan.module_problem import plain_results
from shardwise.plan.module_text import Entry
from shardwise.plan.module_trace import BOUNDARY, INPUT, OP, PARAMETER, Value

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def plan_of_choices(module: nn.Module, costs: ModuleCosts, chosen: list[Choice]) -> dict[str, Entry]:
    """The plan that leads to these choices."""
    graph = costs.graph
    found = _Styles(module, costs, chosen).entries()
    names = {name for names in graph.names.values() for name in names}
    return as_globs(found, [*dict(module.named_modules(remove_duplicate=False)), *names])


class _Styles:
    """The styles of the modules of a graph."""

    def __init__(self, module: nn.Module, costs: ModuleCosts, chosen: list[Choice]) -> None:
        self.graph = graph = costs.graph
        self.units, self.chosen, self.ranks = costs.units, chosen, costs.shape[1]
        self.modules = dict(module.named_modules(remove_duplicate=False))
        by_first = {node.name: number for number, node in enumerate(graph.nodes) if node.kind == PARAMETER}
        self.parameters = {name: by_first[first] for first, names in graph.names.items() for name in names}
        self.used = {value for node in graph.nodes for value in node.operands}
        self.inside: dict[str, list[int]] = defaultdict(list)  # the nodes of each module that runs
        for number, node in enumerate(graph.nodes):
            if node.kind in (OP, BOUNDARY):
                self.inside[node.module].append(number)

    def entries(self) -> dict[str, list[Entry]]:
        """The entries for each path."""
        found: dict[str, list[Entry]] = defaultdict(list)
        for path, module in self.modules.items():
            if path not in self.inside:
                continue
            style = self._style(path, module)
            if style is not None:
                found[path].append(style)
            else:
                found[path] += self._boundaries(path, module)
        for name, number in self.parameters.items():
            styled = found.get(name.rpartition(".")[0], [])
            if not any(isinstance(x, ColwiseParallel | RowwiseParallel | SequenceParallel) for x in styled):
                placement = self._placement(Value(number), self.chosen[number].outputs[0])
                found[name] = [placement]
        if self.graph.returns_tensor and self.graph.result(self.graph.outputs[0]).shape:
            (value,) = self.graph.outputs
            by_layer = any(isinstance(x, ColwiseParallel | RowwiseParallel) for x in found[self._module(value)])
            if not (by_layer and self._returns_result(self._module(value))):
                have = self.chosen[value.node].outputs[value.result]
                found[""].append(PrepareModuleOutput(output_layouts=have, desired_output_layouts=REPLICATE))
        return {path: entries for path, entries in found.items() if entries}

    def _module(self, value: Value) -> str:
        return self.graph.nodes[value.node].module

    def _returns_result(self, path: str) -> bool:
        """Whether a module returns only plain results of the step, which nothing else reads."""
        results = {x for x in plain_results(self.graph) if self._module(x) == path}
        leaves = {Value(i) for i in self.inside[path] if self.graph.nodes[i].is_output}
        return bool(results) and leaves <= results and not results & self.used

    def _placement(self, value: Value, placement: Placement) -> Placement:
        """A placement with shard sizes that are multiples of units."""
        if isinstance(placement, Shard) and self._unit(value, placement.dim) > 1:
            return self.units.shard(value, placement.dim, self.ranks)
        return placement

    def _unit(self, value: Value, dim: int) -> int:
        """The elements that stay on one rank; 1 if equal shards keep them together."""
        unit = self.units.size(value, dim)
        return 1 if self.graph.result(value).shape[dim] % (unit * self.ranks) == 0 else unit

    # ---- layers -----------------------------------------------------------------------------------------------

    def _style(self, path: str, module: nn.Module) -> ParallelStyle | None:
        """The style of a layer of features, or of a module that runs on a shard of the sequence."""
        kind = next((k for k in WEIGHT_DIMS if isinstance(module, k)), None)
        own = {name: self.chosen[self.parameters[self._name(path, name)]].outputs[0] for name in module._parameters
               if self._name(path, name) in self.parameters}  # fmt: skip
        weight = own.get("weight")
        if kind is not None and isinstance(weight, Shard):
            return self._features(path, weight.dim, WEIGHT_DIMS[kind])
        shard = self._runs_on(path)
        if path in self.graph.leaves and own and isinstance(shard, Shard) and set(own.values()) == {REPLICATE}:
            left = self._leaves_as(path)
            if left is None or left == shard:
                return SequenceParallel(sequence_dim=shard.dim)
        return None

    def _features(self, path: str, dim: int, dims: tuple[int, int]) -> ParallelStyle:
        weight = self.parameters[f"{path}.weight" if path else "weight"]
        unit = self._unit(Value(weight), dim)
        is_result = self._returns_result(path)
        options: dict[str, Any] = {} if is_result else {"use_local_output": False}
        options |= {"unit": unit} if unit > 1 else {}
        left = REPLICATE if is_result else self._leaves_as(path)
        if dim == dims[OUTPUT_FEATURES]:
            last = Shard(len(self.graph.result(Value(self.inside[path][0])).shape) - 1)
            options |= {"output_layouts": left} if left not in (None, last) else {}
            return ColwiseParallel(**options)
        assert dim == dims[INPUT_FEATURES]
        inside = [self.graph.nodes[number] for number in self.inside[path]]
        entering = [self.graph.nodes[node.operands[0].node] for node in inside]
        if not all(x.of_parameters for x in entering) and not isinstance(self.modules[path], nn.Embedding):
            options["input_layouts"] = REPLICATE  # a plain tensor, which every rank has
        options |= {"output_layouts": left} if left not in (None, REPLICATE) else {}
        return RowwiseParallel(**options)

    def _runs_on(self, path: str) -> Placement | None:
        """The placement in which the first op of a module reads an input; None if the input may be a plain tensor."""
        for number in self.inside[path]:
            for value, placement in zip(self.graph.nodes[number].operands, self.chosen[number].inputs, strict=True):
                source = self.graph.nodes[value.node]
                if source.kind in (INPUT, OP) and not source.of_parameters:
                    return None
                if source.of_parameters and source.kind != PARAMETER and source.module != path:
                    return placement
        return None

    def _leaves_as(self, path: str) -> Placement | None:
        """The placement of the tensor that leaves a module; None if there is none."""
        return next((self.chosen[i].outputs[0] for i in self.inside[path] if self.graph.nodes[i].is_output), None)

    # ---- other boundaries -------------------------------------------------------------------------------------

    def _boundaries(self, path: str, module: nn.Module) -> list[Entry]:
        """Redistributions of the arguments and of the result of a module."""
        enter: list[Entry] = []
        leave: list[Entry] = []
        arguments: dict[str, Placement] = {}
        for number in self.inside[path]:
            node = self.graph.nodes[number]
            enters = node.kind == BOUNDARY and not node.is_output
            if enters or (node.kind == OP and path in self.graph.leaves):
                for value, wanted in zip(node.operands, self.chosen[number].inputs, strict=True):
                    source = self.graph.nodes[value.node]
                    have = self.chosen[value.node].outputs[value.result]
                    outside = source.of_parameters and source.kind != PARAMETER and source.module != path
                    if outside and have != wanted:
                        arguments.setdefault(_argument(module, node.name if enters else "0"), wanted)
            if node.is_output and not leave:  # of several calls, the first that differs decides
                (value,) = node.operands
                have, wanted = self.chosen[value.node].outputs[value.result], self.chosen[number].outputs[0]
                if have != wanted:
                    leave.append(PrepareModuleOutput(
                        output_layouts=have, desired_output_layouts=wanted, use_local_output=False
                    ))  # fmt: skip
        if arguments:
            enter.append(PrepareModuleInput(
                input_kwarg_layouts=dict.fromkeys(arguments, REPLICATE),  # plain tensors are replicated
                desired_input_kwarg_layouts=arguments,
            ))  # fmt: skip
        return enter + leave

    @staticmethod
    def _name(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name


def _argument(module: nn.Module, name: str) -> str:
    """The name of an argument; a boundary may have its position."""
    return forward_arguments(module).positional[int(name)] if name.isdecimal() else name


# ---- globs ----------------------------------------------------------------------------------------------------------


def as_globs(entries: Mapping[str, list[Entry]], paths: list[str]) -> dict[str, Entry]:
    """Entries by path, or by glob if all modules or parameters of one form have equal entries."""
    forms: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        forms[_NUMBER.sub("*", path)].add(path)
    found: dict[str, Entry] = {}
    for path, own in entries.items():
        glob = _NUMBER.sub("*", path)
        key = glob if all(entries.get(other) == own for other in forms[glob]) else path
        found[key] = own[0] if len(own) == 1 else _joined(own)
    return found


def globs(paths: Iterable[str]) -> list[str]:
    """The paths with `*` for numbers, each once."""
    return list(dict.fromkeys(_NUMBER.sub("*", path) for path in paths))


def _joined(entries: list[Entry]) -> Entry:
    """One style for the inputs and outputs of a module."""
    enter, leave = entries
    assert isinstance(enter, PrepareModuleInput)
    assert isinstance(leave, PrepareModuleOutput)
    return PrepareModuleInputOutput(
        input_kwarg_layouts=enter.input_kwarg_layouts,
        desired_input_kwarg_layouts=enter.desired_input_kwarg_layouts,
        output_layouts=leave.output_layouts,
        desired_output_layouts=leave.desired_output_layouts,
        use_local_output=False,
    )
