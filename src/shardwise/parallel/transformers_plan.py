"""`plan_from_transformers`: the plan of `parallelize_module` that a model of Hugging Face has."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from shardwise._layout import REPLICATE, Placement, Shard, checked
from shardwise._torch_bridge import module_sharding
from shardwise.errors import PlanError
from shardwise.parallel.prepare import PrepareModuleOutput
from shardwise.parallel.styles import (
    ColwiseParallel,
    InputFn,
    ModuleContext,
    OutputFn,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    first_input,
)


@checked
def plan_from_transformers(model: nn.Module) -> dict[str, ParallelStyle | Placement]:
    """The plan for `parallelize_module` from a model's own tensor-parallel plan and tied weights.

        parallelize_module(model, mesh, plan_from_transformers(model))

    The model's plan is that of its class and of its config (`base_model_tp_plan`); experts that it leaves out are
    sharded as `base_model_ep_plan` has it. Heads stay on one rank: layers of an attention are sharded in units of the
    query heads that share a key. Between layers that are sharded alike activations are DTensors, so no number has to
    divide another. Parameters that the plan does not name stay as they are, on every rank.

    Args:
        model: of transformers 5, built from a config or loaded; nothing of it changes.

    Returns:
        Paths of modules with styles, and of parameters with placements.

    Raises:
        PlanError: the model has no plan; a style that is not known here, by its name and path.
    """
    own: Mapping[str, str] = {**(getattr(model, "_ep_plan", None) or {}), **(getattr(model, "_tp_plan", None) or {})}
    if not own:
        raise PlanError(
            f"{type(model).__name__} has no tensor-parallel plan: neither its class nor its config names one. "
            f"Fix: shard_module with layouts of parameters, or fully_shard."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    named = module_sharding.named_parameters(model)
    plan: dict[str, ParallelStyle | Placement] = {}
    for key, style in own.items():
        if style not in STYLES and style not in WITHOUT_STYLE:
            raise PlanError(
                f"{type(model).__name__}: its plan has the style {style!r} for {key!r}, which is not known here. "
                f"Known: {', '.join(sorted({*STYLES, *WITHOUT_STYLE}))}. "
                f"Fix: give parallelize_module a plan of your own, with styles of shardwise.parallel."
            )
        of_modules = module_sharding.resolve([key], list(modules), "module")[0][key]
        of_parameters = module_sharding.resolve([key], list(named), "parameter")[0][key]
        found: dict[str, ParallelStyle | Placement] = {}
        if style in STYLES:
            found = {path: _in_units(STYLES[style], modules, path) for path in of_modules}
        found |= {path: _placement(style, named[path].ndim) for path in of_parameters}
        same = len({repr(entry) for entry in found.values()}) == 1
        plan |= {key: next(iter(found.values()))} if same else found
    return plan | dict(_tied(modules, plan))


# ---- of modules -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Experts(ParallelStyle):
    """Experts whose stacked parameters the plan names: tokens and results are replicated."""

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        return first_input(module, context.redistribution(REPLICATE, REPLICATE))

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn:
        return context.redistribution(None, REPLICATE, use_local_output=True, what="the output")


@dataclass(frozen=True, kw_only=True)
class _SequenceParallel(SequenceParallel):
    """Sharded along the sequence inside the module only: the layers around it are not."""

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        return first_input(module, context.redistribution(REPLICATE, Shard(self.sequence_dim)))

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn:
        return context.redistribution(None, REPLICATE, use_local_output=True, what="the output")


COLWISE, COLWISE_GATHERED = ColwiseParallel(use_local_output=False), ColwiseParallel(output_layouts=REPLICATE)
ROWWISE, ROWWISE_SPLIT = RowwiseParallel(), RowwiseParallel(input_layouts=REPLICATE)
STYLES: Mapping[str, ParallelStyle] = {
    "colwise": COLWISE,
    "packed_colwise": COLWISE,
    "colwise_gather_output": COLWISE_GATHERED,
    "colwise_rep": COLWISE_GATHERED,
    "rowwise": ROWWISE,
    "packed_rowwise": ROWWISE,
    "rowwise_split_input": ROWWISE_SPLIT,
    "rowwise_rep": ROWWISE_SPLIT,
    "embedding_rowwise": ROWWISE,
    "embedding_colwise": COLWISE_GATHERED,
    "sequence_parallel": _SequenceParallel(),
    "all_reduce": PrepareModuleOutput(output_layouts=REPLICATE, desired_output_layouts=REPLICATE),
    "moe_tp_experts": _Experts(),
    "ep_dispatch_experts": _Experts(),
}
WITHOUT_STYLE = (
    "replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj", "moe_identity_expert",
    "grouped_gemm",
)  # fmt: skip
"""Torch's styles that need none here: DTensors reduce gradients, for example, without a style."""


def _in_units(style: ParallelStyle, modules: Mapping[str, nn.Module], path: str) -> ParallelStyle:
    """A layer of an attention is sharded in units of the query heads that share a key, if it has such units."""
    module, attention = modules[path], modules[path.rpartition(".")[0]]
    heads = _key_heads(attention)
    if heads is None or not isinstance(module, nn.Linear) or not isinstance(style, ColwiseParallel | RowwiseParallel):
        return style
    features = module.out_features if isinstance(style, ColwiseParallel) else module.in_features
    return style if features % heads else replace(style, unit=features // heads)


def _key_heads(attention: nn.Module) -> int | None:
    """The number of keys of an attention, None of any other module."""
    if not hasattr(attention, "head_dim") and not hasattr(attention, "head_size"):
        return None
    config = getattr(attention, "config", None)
    return getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)


def _tied(modules: Mapping[str, nn.Module], plan: Iterable[str]) -> Iterator[tuple[str, ParallelStyle]]:
    """A style for each table or linear layer whose weight is that of a layer in the plan, and that is in none."""
    matched = module_sharding.resolve(plan, list(modules), "module")[0]
    styled = {path for paths in matched.values() for path in paths}
    weights = {id(modules[path]._parameters.get("weight")) for path in styled} - {id(None)}
    for path, module in modules.items():
        if path not in styled and id(module._parameters.get("weight")) in weights:
            if isinstance(module, nn.Linear):
                yield path, COLWISE_GATHERED
            elif isinstance(module, nn.Embedding):
                yield path, ROWWISE


# ---- of parameters --------------------------------------------------------------------------------------------------


def _placement(style: str, ndim: int) -> Placement:
    """The placement of a parameter that the plan names. A stack of weights has the experts first."""
    if style == "grouped_gemm":
        return Shard(0)
    if style.endswith("colwise"):
        return Shard(max(ndim - 2, 0))
    return Shard(ndim - 1) if style.endswith("rowwise") and ndim > 1 else REPLICATE
