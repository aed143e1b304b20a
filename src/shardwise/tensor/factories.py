"""New distributed tensors: constants, random ones, and random refills of existing ones."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from shardwise import collectives, random
from shardwise.errors import LayoutError, RuleError
from shardwise.layout import Layout
from shardwise.placement import REPLICATE, Placement
from shardwise.tensor.dtensor import DTensor, default_mesh, plain, tag


def _made(
    size: tuple[Any, ...],
    device_mesh: Any,
    placements: Sequence[Placement] | None,
    dtype: torch.dtype | None,
    layout: torch.layout,
) -> DTensor:
    if layout is not torch.strided:
        raise LayoutError(f"Only dense (torch.strided) tensors can be made, got layout={layout}.")
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    mesh = default_mesh() if device_mesh is None else collectives.as_mesh(device_mesh)
    where = Layout(mesh, [REPLICATE] * mesh.ndim if placements is None else placements, shape)
    return tag(torch.empty(where.local_shape(collectives.rank()), dtype=dtype, device=mesh.device_type), where)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global shape `size` whose values are whatever the memory held."""
    made = _made(size, device_mesh, placements, dtype, layout)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """A DTensor of global shape `size` with one value everywhere; its dtype is that of `torch.full`."""
    dtype = torch.full((), fill_value).dtype if dtype is None else dtype
    made = _made((size,), device_mesh, placements, dtype, layout)
    if made._layout.partial_axes:
        raise LayoutError(f"A constant has no summands: {list(made.placements)}. Fix: use Replicate() or Shard().")
    with DisableTorchFunctionSubclass():
        made.fill_(fill_value)
    return made.requires_grad_(requires_grad)  # type: ignore[return-value]


def zeros(*size: Any, **kwargs: Any) -> DTensor:
    """A DTensor of zeros; keyword arguments as for `empty`."""
    return full(_shape(size), 0.0, **{"dtype": torch.get_default_dtype(), **_given(kwargs)})


def ones(*size: Any, **kwargs: Any) -> DTensor:
    """A DTensor of ones; keyword arguments as for `empty`."""
    return full(_shape(size), 1.0, **{"dtype": torch.get_default_dtype(), **_given(kwargs)})


def rand(*size: Any, requires_grad: bool = False, **kwargs: Any) -> DTensor:
    """Uniform in [0, 1); the same seed gives the same tensor for every mesh and layout. Arguments as `empty`."""
    return _random(random.uniform, empty(*size, **kwargs)).requires_grad_(requires_grad)  # type: ignore[return-value]


def randn(*size: Any, requires_grad: bool = False, **kwargs: Any) -> DTensor:
    """Standard normal; the same seed gives the same tensor for every mesh and layout. Arguments as `empty`."""
    return _random(random.normal, empty(*size, **kwargs)).requires_grad_(requires_grad)  # type: ignore[return-value]


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if not (k == "dtype" and v is None)}


# ---- random refills ----------------------------------------------------------------------------------------


def _random(values: random.Fill, x: DTensor) -> DTensor:
    if x._layout.partial_axes:
        raise RuleError(f"A random tensor has no summands: {x._layout}. Fix: use Replicate() or Shard().")
    with torch.no_grad():
        random.fill(plain(x.detach()), x._layout, random.draw_seed(x._layout), values)
    return x


def uniform_(x: DTensor, a: float = 0.0, b: float = 1.0, *, generator: torch.Generator | None = None) -> DTensor:
    """Uniform in [a, b), independent of the layout."""
    _own_generator(generator)
    return _random(lambda index, seed, dtype: random.uniform(index, seed, dtype) * (b - a) + a, x)


def normal_(x: DTensor, mean: float = 0.0, std: float = 1.0, *, generator: torch.Generator | None = None) -> DTensor:
    """Normal with the given mean and standard deviation, independent of the layout."""
    _own_generator(generator)
    return _random(lambda index, seed, dtype: random.normal(index, seed, dtype) * std + mean, x)


def kaiming_uniform_(
    x: DTensor, a: float = 0, mode: str = "fan_in", nonlinearity: str = "leaky_relu", generator: Any = None
) -> DTensor:
    """He's initialisation (arXiv 1502.01852) from the global fan."""
    fan = torch.nn.init._calculate_correct_fan(x, mode)  # type: ignore[arg-type]
    gain = torch.nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    bound = 3.0**0.5 * gain / fan**0.5
    return uniform_(x, -bound, bound, generator=generator)


def constant_(x: DTensor, val: float) -> DTensor:
    with torch.no_grad():
        x.fill_(val)
    return x


def _own_generator(generator: torch.Generator | None) -> None:
    if generator is not None:
        raise RuleError(
            "Random DTensors take their seed from torch's default generator; generator= is not supported yet."
        )


def _special(function: Any) -> Any:
    """Adapt a function of a DTensor to the handler's signature; nn.init passes its tensor by keyword."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        kwargs = dict(kwargs)
        x = args[0] if args else kwargs.pop("tensor")
        result: Tensor = function(x, *args[1:], **{_SPELLED.get(k, k): v for k, v in kwargs.items()})
        return result

    return handler


_SPELLED = {"from": "a", "to": "b"}

DTensor._specials |= {
    Tensor.uniform_: _special(uniform_),
    Tensor.normal_: _special(normal_),
    torch.nn.init.uniform_: _special(uniform_),
    torch.nn.init.normal_: _special(normal_),
    torch.nn.init.constant_: _special(constant_),
    torch.nn.init.kaiming_uniform_: _special(kaiming_uniform_),
}
