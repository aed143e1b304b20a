"""Parallel styles: how one module is parallelised, as in `torch.distributed.tensor.parallel`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise._layout import (
    REPLICATE,
    Kind,
    Layout,
    Mesh,
    Placement,
    Shard,
    axis_names,
    checked,
    checked_init,
    chunk,
    describe,
    placement_of,
    shown,
)
from shardwise._rules.row import Args, Kwargs
from shardwise._tensor import DTensor
from shardwise.errors import LayoutError, PlanError
from shardwise.parallel.boundary import AxisPlacements, BoundaryRedistribution, SharedInput

PlacementsLike = Placement | Sequence[Placement | None] | Mapping[str, Placement | None]
"""A placement on the tensor-parallel axis; or one per mesh axis, in a sequence or by axis name.

None, or an axis that a mapping omits, is the default there: parameters are replicated, plain inputs are this rank's
rows of the batch, DTensors keep their placement.
"""


def _are_placements_like(value: object) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(p is None or placement_of(p) is not None for p in value)
    return placement_of(value) is not None


describe(
    PlacementsLike,
    Kind(
        "a placement, or one per mesh axis",
        _are_placements_like,
        'such as Shard(0), or {"tp": Shard(0)} by axis name',
        PlanError,
    ),
)

LAST_DIM = Shard(-1)
SHARDS_BATCH = "_shards_batch"  # attribute of a parameter: see `ParallelStyle.shards_batch`
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
InputFn = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]
"""A function from the arguments of a module, by position and by name, to those that its `forward` gets."""
OutputFn = Callable[[Any], Any]
"""A function from the output of a module's `forward` to what its caller gets."""


# ---- the base class, and what subclasses need -----------------------------------------------------------------------


@checked_init
@dataclass(frozen=True)
class ModuleContext:
    """The module that a style is applied to, and its mesh.

    Args:
        path: of the module, for errors; empty for the root.
        mesh: of the plan.
        axis: the tensor-parallel axis, to which a single placement refers; the others are data axes.
        shared: the input that the module may share with its siblings.
        style: the class of the style, for communication traces.
    """

    path: str
    mesh: Mesh
    axis: int
    shared: SharedInput = field(default_factory=SharedInput, compare=False, repr=False)
    style: str = ""

    @property
    def axis_size(self) -> int:
        """The number of ranks along the tensor-parallel axis."""
        return self.mesh.shape[self.axis]

    def axes(self, placements: PlacementsLike | None) -> AxisPlacements:
        """One placement per mesh axis, None where none is given.

        Raises:
            PlanError: a wrong number of placements, an unknown axis name, or an object that is not a placement.
        """
        one = placement_of(placements)
        if one is not None or placements is None:
            return tuple(one if axis == self.axis else None for axis in range(self.mesh.ndim))
        if isinstance(placements, Mapping):
            try:
                placements = [placements.get(name) for name in axis_names(self.mesh, placements)]
            except LayoutError as error:
                raise PlanError(str(error)) from None
        if not _are_placements_like(placements):
            raise PlanError(
                f"{shown(placements)} is not a placement. Fix: Shard(dim), Replicate(), or one of them for every axis."
            )
        assert isinstance(placements, Sequence)
        if len(placements) != self.mesh.ndim:
            raise PlanError(
                f"{list(placements)} are {len(placements)} placements, {self.mesh} has {self.mesh.ndim} axes. "
                f"Fix: one for each axis, None for the default; or a single placement for axis {self.axis}."
            )
        return tuple(placement_of(p) for p in placements)

    def axes_with_sizes(self, placements: PlacementsLike, sized: Shard) -> AxisPlacements:
        """`axes` with `Shard(-1)` replaced by `sized`."""
        return tuple(sized if a == self.axis and p == LAST_DIM else p for a, p in enumerate(self.axes(placements)))

    def layout(self, placements: PlacementsLike, shape: Sequence[int]) -> Layout:
        """The layout of a parameter, replicated on axes without a placement."""
        return Layout(self.mesh, [p or REPLICATE for p in self.axes(placements)], shape)

    def redistribution(
        self,
        plain_layout: PlacementsLike | None,
        desired_layout: PlacementsLike | None,
        *,
        use_local_output: bool = False,
        what: str = "the input",
        features: int | None = None,
    ) -> BoundaryRedistribution:
        """Redistributes a tensor at the boundary of the module.

        Args:
            plain_layout: how a plain tensor is laid out; along data axes it is this rank's shard of the batch,
                `Shard(0)`. None requires a DTensor.
            desired_layout: what to redistribute to; None keeps the layout. Data axes keep theirs.
            use_local_output: return the local tensor.
            what: names the tensor in errors.
            features: that the last dim of a plain tensor must have in all, if known.
        """
        plain = None if plain_layout is None else self.axes(plain_layout)
        desired = self.axes(desired_layout)
        what = f"{what} of {self.path or 'the module'}"
        return BoundaryRedistribution(
            self.mesh, self.axis, plain, desired, use_local_output, what, self.shared, features, self.style
        )


@dataclass(frozen=True)
class ParallelStyle:
    """The parallelisation of a module. Subclass it as a frozen dataclass and override the methods that do something.

    All methods are called before any module changes; their errors are collected.
    """

    def parameters(self, module: nn.Module, context: ModuleContext) -> Mapping[str, PlacementsLike]:
        """Placements of parameters, by name. If any is named, the others of the module are replicated."""
        return {}

    def shards_batch(self, context: ModuleContext) -> bool:
        """Whether plain inputs of the ranks of the tensor-parallel axis are parts of the batch, each with its loss."""
        return False

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn | None:
        """A function of the positional and keyword arguments of forward that returns new ones."""
        return None

    def forward_fn(self, module: nn.Module, context: ModuleContext) -> Callable[..., Tensor] | None:
        """A function that replaces the module's forward; its arguments come from `input_fn`."""
        return None

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn | None:
        """A function of the output of forward that returns a new one."""
        return None


@dataclass(frozen=True)
class ModuleInputs:
    """Transforms the arguments of a forward, some of which may be passed either way."""

    by_position: Sequence[Callable[[Any], Any] | None]
    by_name: Mapping[str, Callable[[Any], Any] | None]

    def __call__(self, args: Args, kwargs: Kwargs) -> Arguments:
        out = [x if transform is None else transform(x) for transform, x in zip(self.by_position, args, strict=False)]
        named = {key: (x, self.by_name.get(key)) for key, x in kwargs.items()}
        return (*out, *args[len(out) :]), {key: x if t is None else t(x) for key, (x, t) in named.items()}


def misused_style(entry: object) -> str:
    """The fix for torch's style, or a class in the place of a style; "" if `entry` is neither."""
    cls = entry if isinstance(entry, type) else type(entry)
    if cls.__module__.startswith("torch.distributed.tensor.parallel"):
        return f"it is torch's class, import {cls.__name__} from shardwise.parallel"
    return f"{cls.__name__}(), with its parentheses" if entry is cls and issubclass(cls, ParallelStyle) else ""


@checked
def first_input(module: nn.Module, transform: Callable[[Tensor], Tensor]) -> InputFn:
    """The `input_fn` of a style that transforms the first argument of forward only."""
    return ModuleInputs([transform], dict.fromkeys(forward_arguments(module).positional[:1], transform))


class ForwardArguments(NamedTuple):
    """The arguments of a forward: those that may be passed by position, all names, and `*args` and `**kwargs`."""

    positional: list[str]
    names: list[str]
    has_var_positional: bool
    has_var_keyword: bool


def forward_arguments(module: nn.Module) -> ForwardArguments:
    found = list(signature(module.forward).parameters.values())
    kinds = [p.kind for p in found]
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return ForwardArguments(
        [p.name for p in found if p.kind in by_position],
        [p.name for p in found if p.kind in (*by_position, Parameter.KEYWORD_ONLY)],
        Parameter.VAR_POSITIONAL in kinds,
        Parameter.VAR_KEYWORD in kinds,
    )


# ---- column-parallel and row-parallel layers ------------------------------------------------------------------------

# The dims of a weight that hold the output features, and the input features (or the rows of a table).
WEIGHT_DIMS: dict[type[nn.Module], tuple[int, int]] = {
    nn.Linear: (0, 1),
    nn.Embedding: (1, 0),
    nn.EmbeddingBag: (1, 0),
}
OUTPUT_FEATURES, INPUT_FEATURES = 0, 1


@dataclass(frozen=True, kw_only=True)
class _FeatureParallel(ParallelStyle):
    """A `Linear`, `Embedding` or `EmbeddingBag` sharded along its features.

    Args:
        input_layouts: how a plain input is laid out, by default as the layer needs it. A DTensor may have any layout.
        output_layouts: what the output is redistributed to.
        use_local_output: return the local tensor.
        unit: features that stay on one rank, such as those of a head. Units are sharded as by `torch.chunk`.
        sizes: the number of units on each rank, instead.
    """

    input_layouts: PlacementsLike | None = None
    output_layouts: PlacementsLike | None = None
    use_local_output: bool = True
    unit: int = 1
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            object.__setattr__(self, "sizes", tuple(self.sizes))

    def weight_shard(self, module: nn.Module, context: ModuleContext, features: int) -> Shard:
        """The placement of the weight, along its `OUTPUT_FEATURES` or `INPUT_FEATURES`."""
        kind = next((k for k in WEIGHT_DIMS if isinstance(module, k)), None)
        if kind is None:
            cls, prefix = type(module), f"{context.path}." if context.path else ""
            inside = [f"{prefix}{name}" for name, x in module.named_modules() if isinstance(x, tuple(WEIGHT_DIMS))]
            raise PlanError(
                f"{type(self).__name__} supports Linear, Embedding and EmbeddingBag of torch.nn, not "
                f"{cls.__module__}.{cls.__qualname__}. Fix: name the layers inside it"
                f"{f', such as {inside[0]!r}' if inside else ''}, or write a style for it."
            )
        dim = WEIGHT_DIMS[kind][features]
        weight = module.weight
        assert isinstance(weight, Tensor)
        return Shard(dim, _shard_sizes(weight.shape[dim], self.unit, self.sizes, context.axis_size))

    def replicated_input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        features = module.in_features if isinstance(module, nn.Linear) else None
        transform = context.redistribution(self.input_layouts or REPLICATE, REPLICATE, features=features)
        return _BagInputs(transform, context) if isinstance(module, nn.EmbeddingBag) else first_input(module, transform)


def _shard_sizes(length: int, unit: int, sizes: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """The number of the `length` features on each of `count` ranks, in multiples of `unit`.

    Raises:
        PlanError: units that do not fill the length.
    """
    if not isinstance(unit, int) or unit < 1 or length % unit:
        raise PlanError(f"{length} features are not a multiple of unit={unit}. Fix: a unit that divides them.")
    units = chunk(length // unit, count) if sizes is None else tuple(sizes)
    if len(units) != count or sum(units) != length // unit or min(units) < 0:
        raise PlanError(
            f"sizes={units} must be {count} numbers that add up to {length // unit}: {length} features"
            f"{f' in units of {unit}' if unit > 1 else ''}, on {count} ranks. "
            f"Fix: such as sizes={chunk(length // unit, count)}."
        )
    return tuple(n * unit for n in units)


@checked_init
@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(_FeatureParallel):
    """Column-parallel: every rank computes some of the output features of `Linear`, `Embedding` or `EmbeddingBag`.

    Input `Replicate()`; output `Shard(-1)`, unless `output_layouts` is given.
    """

    def parameters(self, module: nn.Module, context: ModuleContext) -> Mapping[str, PlacementsLike]:
        shard = self.weight_shard(module, context, OUTPUT_FEATURES)
        return {"weight": shard, "bias": Shard(0, shard.sizes)} if isinstance(module, nn.Linear) else {"weight": shard}

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        return self.replicated_input_fn(module, context)

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn:
        sizes = self.weight_shard(module, context, OUTPUT_FEATURES).sizes
        desired = context.axes_with_sizes(self.output_layouts or LAST_DIM, Shard(-1, sizes))
        return context.redistribution(None, desired, use_local_output=self.use_local_output, what="the output")


@checked_init
@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(_FeatureParallel):
    """Row-parallel: every rank sums over some of the input features of a `Linear`, or owns some rows of a table.

    Input of a `Linear`: `Shard(-1)` with the sizes of the weight, which a plain input is assumed to have. Ids of a
    table: `Replicate()`. Output: `Replicate()`, unless `output_layouts` is given.
    """

    def parameters(self, module: nn.Module, context: ModuleContext) -> Mapping[str, PlacementsLike]:
        return {"weight": self.weight_shard(module, context, INPUT_FEATURES)}

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        if not isinstance(module, nn.Linear):
            return self.replicated_input_fn(module, context)
        shard = Shard(-1, self.weight_shard(module, context, INPUT_FEATURES).sizes)
        plain_layout = context.axes_with_sizes(self.input_layouts or LAST_DIM, shard)
        return first_input(module, context.redistribution(plain_layout, shard))

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn:
        desired = self.output_layouts or REPLICATE
        return context.redistribution(None, desired, use_local_output=self.use_local_output, what="the output")


@dataclass(frozen=True)
class _BagInputs:
    """Redistributes ids and per-sample weights of an `EmbeddingBag`."""

    transform: BoundaryRedistribution
    context: ModuleContext

    def __call__(self, args: Args, kwargs: Kwargs) -> Arguments:
        named = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        offsets, mesh = named.get("offsets"), self.context.mesh
        if isinstance(offsets, Tensor) and not isinstance(offsets, DTensor) and mesh.size() > self.context.axis_size:
            raise PlanError(
                f"{self.transform.what}: on {mesh} plain ids are a shard of the batch, but offsets count from the "
                f"first of all ids. Fix: 2-D ids, or DTensors for ids and offsets."
            )
        named["input"] = self.transform(named["input"])
        if named.get("per_sample_weights") is not None:
            named["per_sample_weights"] = self.transform(named["per_sample_weights"])
        return (), named


@checked_init
@dataclass(frozen=True, kw_only=True)
class SequenceParallel(ParallelStyle):
    """Sequence-parallel LayerNorm, RMSNorm, Dropout and the like: replicated parameters, sharded activations.

    Args:
        sequence_dim: of the input. A plain input is this rank's shard of it; its sizes on other ranks cost one small
            exchange per call. A DTensor is redistributed if it is sharded otherwise.
        use_local_output: return the local tensor.
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def parameters(self, module: nn.Module, context: ModuleContext) -> Mapping[str, PlacementsLike]:
        return {name: REPLICATE for name, _ in module.named_parameters(remove_duplicate=False)}

    def input_fn(self, module: nn.Module, context: ModuleContext) -> InputFn:
        shard = Shard(self.sequence_dim)
        return first_input(module, context.redistribution(shard, shard))

    def output_fn(self, module: nn.Module, context: ModuleContext) -> OutputFn | None:
        if not self.use_local_output:
            return None
        return context.redistribution(None, None, use_local_output=True, what="the output")
