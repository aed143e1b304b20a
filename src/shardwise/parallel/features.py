"""Layers cut by their features: by columns (what they compute) or by rows (what they sum over)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.layout import REPLICATE, Shard, chunk
from shardwise.parallel.boundary import Crossing
from shardwise.parallel.styles import LAST, After, Arguments, Before, ParallelStyle, Placed, Where, first
from shardwise.tensor import DTensor

# The dims of a weight: the features that come out, and those (or the rows of a table) that are summed or looked up.
DIMS: dict[type[nn.Module], tuple[int, int]] = {nn.Linear: (0, 1), nn.Embedding: (1, 0), nn.EmbeddingBag: (1, 0)}


@dataclass(frozen=True, kw_only=True)
class _ByFeatures(ParallelStyle):
    """What both have.

    Args:
        input_layouts: how a plain input is laid out, by default as the layer needs it. A DTensor may come in any way.
        output_layouts: what the output is moved to.
        use_local_output: hand on this rank's part as a plain tensor.
        unit: features that stay together, such as those of a head. The cut is that of `torch.chunk` on units.
        sizes: how many units every rank gets, instead.
    """

    input_layouts: Placed | None = None
    output_layouts: Placed | None = None
    use_local_output: bool = True
    unit: int = 1
    sizes: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            if not isinstance(self.sizes, Sequence) or not all(type(n) is int for n in self.sizes):
                raise PlanError(f"sizes are integers, one a rank, got {self.sizes!r}. Fix: such as sizes=(3, 3, 2).")
            object.__setattr__(self, "sizes", tuple(self.sizes))

    def cut(self, module: nn.Module, where: Where, side: int) -> Shard:
        """How the weight is cut: side 0 by the features that come out, side 1 by the others."""
        kind = next((k for k in DIMS if isinstance(module, k)), None)
        if kind is None:
            raise PlanError(
                f"{type(self).__name__} knows Linear, Embedding and EmbeddingBag, not {type(module).__name__}. "
                f"Fix: name the layers inside it, or write a style for it."
            )
        dim = DIMS[kind][side]
        weight = module.weight
        assert isinstance(weight, Tensor)
        return Shard(dim, cut_in_units(weight.shape[dim], self.unit, self.sizes, where.positions))


def cut_in_units(length: int, unit: int, sizes: Sequence[int] | None, positions: int) -> tuple[int, ...]:
    """How many of `length` features every position gets, in multiples of `unit`.

    Raises:
        PlanError: units that do not fill the length.
    """
    if not isinstance(unit, int) or unit < 1 or length % unit:
        raise PlanError(f"{length} features are no multiple of unit={unit}. Fix: a unit that divides them.")
    units = chunk(length // unit, positions) if sizes is None else tuple(sizes)
    if len(units) != positions or sum(units) != length // unit or min(units) < 0:
        raise PlanError(
            f"sizes={units} must be {positions} numbers that add up to {length // unit}: {length} features"
            f"{f' in units of {unit}' if unit > 1 else ''}, on {positions} ranks."
        )
    return tuple(n * unit for n in units)


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(_ByFeatures):
    """Every rank computes some of the features that come out, of `Linear`, `Embedding` or `EmbeddingBag`.

    The input is wanted whole. The output is cut in its last dim, unless `output_layouts` says otherwise.
    """

    def parameters(self, module: nn.Module, where: Where) -> Mapping[str, Placed]:
        cut = self.cut(module, where, 0)
        return {"weight": cut, "bias": Shard(0, cut.sizes)} if isinstance(module, nn.Linear) else {"weight": cut}

    def before(self, module: nn.Module, where: Where) -> Before:
        return _inputs(module, where, where.crossing(self.input_layouts or REPLICATE, REPLICATE))

    def after(self, module: nn.Module, where: Where) -> After:
        wanted = where.cut_as(self.output_layouts or LAST, Shard(-1, self.cut(module, where, 0).sizes))
        return where.crossing(None, wanted, local=self.use_local_output, what="the output")


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(_ByFeatures):
    """Every rank sums over some of the features that go in (`Linear`), or holds some rows of the table.

    The input of a `Linear` is wanted cut in its last dim as the weight is; a plain one is taken to be so, uneven or
    not. Ids are wanted whole. The output is whole, unless `output_layouts` says otherwise.
    """

    def parameters(self, module: nn.Module, where: Where) -> Mapping[str, Placed]:
        return {"weight": self.cut(module, where, 1)}

    def before(self, module: nn.Module, where: Where) -> Before:
        if not isinstance(module, nn.Linear):
            return _inputs(module, where, where.crossing(self.input_layouts or REPLICATE, REPLICATE))
        cut = Shard(-1, self.cut(module, where, 1).sizes)
        return first(module, where.crossing(where.cut_as(self.input_layouts or LAST, cut), cut))

    def after(self, module: nn.Module, where: Where) -> After:
        return where.crossing(None, self.output_layouts or REPLICATE, local=self.use_local_output, what="the output")


def _inputs(module: nn.Module, where: Where, crossing: Crossing) -> Before:
    return _BagInputs(crossing, where) if isinstance(module, nn.EmbeddingBag) else first(module, crossing)


@dataclass(frozen=True)
class _BagInputs:
    """Ids, and what weighs them or says where bags begin."""

    crossing: Crossing
    where: Where

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        named = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        offsets, mesh = named.get("offsets"), self.where.mesh
        if isinstance(offsets, Tensor) and not isinstance(offsets, DTensor) and mesh.size() > self.where.positions:
            raise PlanError(
                f"{self.crossing.what}: on {mesh} plain ids are a part of the batch, but offsets count from the first "
                f"of all ids. Fix: 2-D ids, or DTensors for ids and offsets."
            )
        named["input"] = self.crossing(named["input"])
        if named.get("per_sample_weights") is not None:
            named["per_sample_weights"] = self.crossing(named["per_sample_weights"])
        return (), named
