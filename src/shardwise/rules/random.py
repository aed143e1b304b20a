"""Random ops: the number of an element comes from its place in the whole, so layouts and ranks do not matter.

Every row, also that for operands that are whole everywhere, runs a local function of this file, which asks for
one seed (`site.seed`) and makes the numbers of this rank's boxes (`shardwise.counter`). Arguments are checked
by torch itself, on one element, before anything is drawn; what only values can tell (a probability above 1) is
told to the ranks that hold other values, in one small exchange.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise import counter
from shardwise.counter import Values
from shardwise.placement import REPLICATE, OnRanks, Shard
from shardwise.rules.pointwise import PARTIALS, broadcast, shape_of_first, shard_rows, tensors_of
from shardwise.rules.row import RULES, LocalFunction, Meta, OpRule, Row, Site, local_with

aten = torch.ops.aten

# Law, and its parameters with their defaults, by the name of the op that refills a tensor.
LAWS: dict[str, tuple[Callable[..., Tensor], dict[str, float | None]]] = {
    "uniform": (counter.between, {"from": 0.0, "to": 1.0}),
    "normal": (counter.gaussian, {"mean": 0.0, "std": 1.0}),
    "log_normal": (counter.log_normal, {"mean": 1.0, "std": 2.0}),
    "cauchy": (counter.cauchy, {"median": 0.0, "sigma": 1.0}),
    "exponential": (counter.exponential, {"lambd": 1.0}),
    "geometric": (counter.geometric, {"p": None}),
    "bernoulli": (counter.bernoulli, {"p": 0.5}),
    "rand_like": (counter.between, {"from": 0.0, "to": 1.0}),
    "randn_like": (counter.gaussian, {"mean": 0.0, "std": 1.0}),
}
OPTIONS = ("dtype", "device", "pin_memory")  # of a new tensor; memory formats are those of local tensors


# ---- rows ---------------------------------------------------------------------------------------------------


def tried(op: Any, *args: Any, **kwargs: Any) -> None:
    """Let torch check the arguments, on one element (one row of categories) and numbers nobody else gets."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "generator")}
    try:
        _try(op, args, kwargs, {})
    except NotImplementedError:
        try:  # some ops torch has on halves on other devices only
            _try(op, args, kwargs, {torch.float16: torch.float32, torch.bfloat16: torch.float32})
        except NotImplementedError as error:  # which of a rule would mean that it has no row
            raise TypeError(f"{error}") from error


def _try(op: Any, args: Sequence[Any], kwargs: dict[str, Any], dtypes: dict[torch.dtype, torch.dtype]) -> None:
    def stand_in(x: Any) -> Any:
        if isinstance(x, Meta):
            categories = x.shape[-1:] if op in MULTINOMIAL else (1,) * min(x.ndim, 1)
            return torch.ones((*(1,) * (x.ndim - 1), *categories), dtype=dtypes.get(x.dtype, x.dtype))
        return None if isinstance(x, torch.Generator) else x

    with torch.random.fork_rng(devices=[]):
        op(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})


def _refill_rows(op: Any, local: LocalFunction, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """x becomes random; what it was does not matter."""
    tried(op, x, *args, **kwargs)
    rows = [replace(row, local=local) for row in shard_rows([x])]
    return rows + [Row((p,), p, "one summand carries the numbers", local) for p in PARTIALS]


def _like_rows(op: Any, local: LocalFunction, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out is random and shaped like x."""
    tried(op, x, *args, **kwargs)
    rows = [replace(row, local=local) for row in shard_rows([x])]
    if op in READ and not args and "p" not in kwargs:
        return rows  # the operand is the parameter
    return rows + [Row((p,), REPLICATE, "the summands are not read", local) for p in PARTIALS]


def parameter_rows(op: Any, local: LocalFunction, *args: Any, **kwargs: Any) -> list[Row]:
    """out[i] is drawn from a law with parameters a[i], b[i], …"""
    tried(op, *args, **kwargs)
    return [replace(row, local=local) for row in shard_rows(tensors_of(args, kwargs))]


def _multinomial_rows(op: Any, local: LocalFunction, x: Meta, *args: Any, **kwargs: Any) -> list[Row]:
    """out[i, j]: a category of row i, so rows must be whole."""
    tried(op, x, *args, **kwargs)
    rows = [Row((Shard(0),), Shard(0), "each rank draws for its own rows", local)] if x.ndim == 2 else []
    if isinstance(x.placement, OnRanks):
        rows.append(Row((x.placement,), x.placement, "the rank that holds the rows draws", local))
    return rows


# ---- numbers of this rank -----------------------------------------------------------------------------------


def _numbers(site: Site, values: Values, dtype: torch.dtype, device: torch.device, generator: Any) -> Tensor:
    """This rank's part of a random tensor laid out as the op's result."""
    out = torch.empty(site.output.local_shape(site.rank), dtype=dtype, device=device)
    counter.fill(out, site.output.boxes(site.rank), site.output.shape, site.seed(generator), values)
    return out


def _law(name: str, dtype: torch.dtype, args: Sequence[Any], kwargs: dict[str, Any]) -> Values:
    if name in ("random", "randint_like"):
        return partial(counter.integers, *_range(dtype, args, kwargs))
    law, defaults = LAWS[name]
    given = defaults | dict(zip(defaults, args, strict=False)) | {k: kwargs[k] for k in defaults if k in kwargs}
    return partial(law, *given.values())


def _range(dtype: torch.dtype, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """From `(high)` or `(low, high)`; without a high, as far as the dtype has every whole number."""
    low, high = (kwargs.get("from", kwargs.get("low")), kwargs.get("to", kwargs.get("high")))
    if len(args) == 1 and high is None:
        high = args[0]
    elif args:
        low, high = (*args, high)[:2]
    if high is None and dtype.is_floating_point:
        high = int(2 / torch.finfo(dtype).eps) + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return int(low or 0), int(high)


def refuse(site: Site, bad: Tensor, message: str) -> None:
    """Raise on every rank if a value is bad on any; asks the others only where they hold other values."""
    mesh, found = site.layouts[0].mesh, bad.any().long().view(1)
    cut = [a for a in range(mesh.ndim) if any(not x.placements[a].is_replicate() for x in site.layouts)]
    ranks = site.ranks(cut) if mesh.coordinate(site.rank) is not None else ()
    if len(ranks) > 1:
        ones = [1] * len(ranks)
        found = site.exchange(found.repeat(len(ranks)), ones, ones, ranks)
    if found.any():
        raise RuntimeError(message)


def without_gradient(values: Tensor, *sources: Any) -> Tensor:
    """Random values pass zeros back to their parameters, as torch's do."""
    yes = torch.ones((), dtype=torch.bool, device=values.device)
    for x in sources:
        if isinstance(x, Tensor) and x.requires_grad:
            values = torch.where(yes, values, x).to(values.dtype)
    return values


# ---- local functions ----------------------------------------------------------------------------------------


def _refill(name: str, site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layout, generator = site.layouts[0], kwargs.get("generator")
    # Autograd must see one op that changes x, not one a chunk.
    new = torch.empty_like(x) if x.requires_grad and torch.is_grad_enabled() else x
    law = _law(name, x.dtype, args, kwargs)
    counter.fill(new, layout.boxes(site.rank), layout.shape, site.seed(generator), law)
    neutral = layout.neutral(site.rank)
    if neutral is not None:
        new.fill_(neutral)
    return x if new is x else x.copy_(new)


def _like(name: str, site: Site, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out = torch.empty_like(x.detach(), **{k: v for k, v in kwargs.items() if k in OPTIONS})
    law = _law(name, out.dtype, args, kwargs)
    counter.fill(out, site.output.boxes(site.rank), site.output.shape, site.seed(kwargs.get("generator")), law)
    return out.requires_grad_(kwargs.get("requires_grad", False))


def _bernoulli(site: Site, x: Tensor, p: Any = None, *, generator: Any = None) -> Tensor:
    if isinstance(p, float | int):
        return without_gradient(_like("bernoulli", site, x, p, generator=generator), x)
    return without_gradient(_chosen(site, x, generator).to(x.dtype), x)


def _chosen(site: Site, p: Tensor, generator: Any) -> Tensor:
    """True with probability p[i]."""
    p = p.detach()
    refuse(site, ~((p >= 0) & (p <= 1)), "bernoulli expects probabilities from 0 to 1.")
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return _numbers(site, counter.uniform, wide, p.device, generator) < p


def _normal(site: Site, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    if isinstance(std, Tensor):
        refuse(site, ~(std >= 0), "normal expects all elements of std >= 0.0")
    like = mean if isinstance(mean, Tensor) else std
    scale, shift = (x.detach() if isinstance(x, Tensor) else x for x in (std, mean))
    numbers = _numbers(site, counter.normal, like.dtype, like.device, generator)
    return without_gradient((numbers * scale + shift).to(like.dtype), mean, std)


def _rrelu(
    site: Site,
    x: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Tensor:
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2)
    slopes = _numbers(site, partial(counter.between, lower, upper), x.dtype, x.device, generator)
    return x * slopes.masked_fill_(~(x.detach() <= 0), 1)


def _multinomial(
    site: Site, x: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Tensor:
    p = x.detach().double()
    refuse(site, ~(p >= 0) | p.isinf(), "probability tensor contains either `inf`, `nan` or element < 0")
    here = bool(site.layouts[0].boxes(site.rank))  # nothing sums to nothing
    refuse(site, (p.sum(-1) == 0) & here, "invalid multinomial distribution (sum of probabilities <= 0)")
    if not replacement:  # the categories whose exponential clocks of rate p ring first
        clocks = torch.empty_like(p)
        layout = site.layouts[0]
        law = partial(counter.exponential, 1.0)
        counter.fill(clocks, layout.boxes(site.rank), layout.shape, site.seed(generator), law)
        return torch.sort(p / clocks, dim=-1, descending=True, stable=True)[1][..., :num_samples].contiguous()
    sums = p.cumsum(-1)
    total = sums[..., -1:]
    at = _numbers(site, counter.uniform, torch.float64, x.device, generator) * total
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))  # rounded up it would be past the last
    return torch.searchsorted(sums, at, right=True)


# ---- the table ----------------------------------------------------------------------------------------------

MULTINOMIAL = (torch.multinomial, Tensor.multinomial, aten.multinomial.default)
READ = (torch.bernoulli, Tensor.bernoulli, aten.bernoulli.default)


def register(ops: Sequence[Any], rows: Callable[..., list[Row]], local: LocalFunction, **kwargs: Any) -> None:
    for op in ops:
        RULES[op] = OpRule(partial(rows, op, local), everywhere=local, random=True, **kwargs)


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name, None)
    return [getattr(packet, o) for o in packet.overloads() if "out" not in o] if packet is not None else []


register([aten.bernoulli_.float], _refill_rows, local_with(_refill, "bernoulli"), in_place=True)
for _name in ("uniform", "normal", "log_normal", "cauchy", "exponential", "geometric", "random"):
    _in_place = [getattr(Tensor, _name + "_"), *_overloads(_name + "_")]
    register(_in_place, _refill_rows, local_with(_refill, _name), in_place=True)
for _name in ("uniform", "log_normal", "cauchy", "exponential", "geometric", "random"):
    register(_overloads(_name), _like_rows, local_with(_like, _name), shape=shape_of_first)
for _name in ("rand_like", "randn_like", "randint_like"):
    _ops = [getattr(torch, _name), *(o for o in _overloads(_name) if "Tensor" not in str(o))]
    register(_ops, _like_rows, local_with(_like, _name), shape=shape_of_first)
register([*READ, aten.bernoulli.p], _like_rows, _bernoulli, shape=shape_of_first)
_normals = [torch.normal, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor]
register(_normals, parameter_rows, _normal, shape=broadcast)
register([torch.rrelu], parameter_rows, _rrelu, shape=shape_of_first)
register(MULTINOMIAL, _multinomial_rows, _multinomial, shape=lambda x, n, *_, **__: (*x.shape[:-1], n))
