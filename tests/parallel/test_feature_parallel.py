"""Colwise and rowwise layers, in pairs and alone: even, uneven, empty, in units, by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import ArgumentError, LayoutError, PlanError
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import (
    assert_same_parameters,
    check_equals_one_process,
    compare,
    full,
    local_shard_of,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
X = torch.arange(18.0).view(3, 6) / 7
IDS = torch.tensor([[0, 6, 2, 3, 3], [1, 1, 5, 0, 6], [4, 2, 0, 0, 1]])


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).square().sum()


class Pair(nn.Module):
    """Two layers with `width` features between them."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, width, bias)
        self.down = nn.Linear(width, 5, bias)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [16, 10, 2])  # on 4 ranks: even, uneven, empty shards
@pytest.mark.parametrize("bias", [True, False])
def test_a_pair_is_the_plain_pair_whatever_its_width(ranks: int, width: int, bias: bool) -> None:
    def body() -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        module = check_equals_one_process(
            Pair(width, bias).double(), lambda m: parallelize_module(m, None, plan), X.double(), loss_of
        )
        up = module.get_parameter("up.weight")
        assert isinstance(up, DTensor)
        assert up.to_local().shape == ((up.layout_.shard_sizes(0) or ())[collectives.rank()], 6)

    world(ranks).run(body)


UNITS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "ten heads": ({"unit": 4}, (12, 12, 12, 4)),
    "by hand": ({"sizes": (0, 30, 9, 1)}, (0, 30, 9, 1)),
    "heads by hand": ({"unit": 4, "sizes": [1, 2, 3, 4]}, (4, 8, 12, 16)),
}


@pytest.mark.parametrize("name", UNITS)
@world(4)
def test_features_are_sharded_by_units_or_explicit_sizes(name: str) -> None:
    options, sharded = UNITS[name]
    plan = {"up": ColwiseParallel(**options), "down": RowwiseParallel(**options)}
    module = check_equals_one_process(Pair(40), lambda m: parallelize_module(m, None, plan), X, loss_of)
    for path, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        assert as_dtensor(module.get_parameter(path)).to_local().shape[dim] == sharded[collectives.rank()]


TABLES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Any]]] = {
    "table": (lambda: nn.Embedding(7, 5, padding_idx=2), (IDS,), {}),
    "bags": (lambda: nn.EmbeddingBag(7, 5, mode="mean"), (IDS,), {}),
    "bags by name": (lambda: nn.EmbeddingBag(7, 5, mode="max"), (), {"input": IDS}),
    "offsets": (lambda: nn.EmbeddingBag(7, 5, mode="sum"), (IDS.flatten(), torch.tensor([0, 4, 4, 9])), {}),
    "weights": (lambda: nn.EmbeddingBag(7, 5, mode="sum"), (IDS,), {"per_sample_weights": torch.rand(3, 5).double()}),
}
STYLES: list[tuple[ParallelStyle, int | None]] = [  # and the dim along which this rank gets its part
    (RowwiseParallel(), None),
    (RowwiseParallel(output_layouts=S0), 0),
    (RowwiseParallel(output_layouts=S1, use_local_output=False, sizes=(0, 6, 1)), None),
    (RowwiseParallel(input_layouts=R, unit=7), None),
    (ColwiseParallel(), -1),
    (ColwiseParallel(output_layouts=R, sizes=(2, 0, 3)), None),
    (ColwiseParallel(input_layouts=R, output_layouts=S0, use_local_output=False), None),
]


@pytest.mark.parametrize("style", STYLES, ids=lambda s: repr(s[0]))
@pytest.mark.parametrize("table", TABLES)
@world(3)
def test_a_row_wise_or_column_wise_table_equals_the_plain_table(
    style: tuple[ParallelStyle, int | None], table: str
) -> None:
    make, args, kwargs = TABLES[table]
    torch.manual_seed(0)
    plain = make().double()
    module = parallelize_module(copy.deepcopy(plain), None, style[0])
    out, want = module(*args, **kwargs), plain(*args, **kwargs)
    assert isinstance(out, DTensor) != style[0].use_local_output  # type: ignore[attr-defined]
    assert_close(full(out), local_shard_of(want, style[1], 3))
    factors = torch.arange(want.numel(), dtype=want.dtype).view(want.shape)
    (out * local_shard_of(factors, style[1], 3)).sum().backward()
    (want * factors).sum().backward()
    assert_same_parameters(module, plain)


@pytest.mark.parametrize(
    ("style", "given", "part"),
    [
        (ColwiseParallel(input_layouts=S0), 0, -1),
        (ColwiseParallel(input_layouts=Shard(-1), output_layouts=S0), -1, 0),
        (ColwiseParallel(input_layouts=Shard(0, (0, 3, 0)), output_layouts=Shard(1, (1, 0, 4))), (0, 3, 0), (1, 0, 4)),
        (RowwiseParallel(input_layouts=R), None, None),
        (RowwiseParallel(input_layouts=S0, output_layouts=S0), 0, 0),
        (RowwiseParallel(output_layouts=Shard(-1)), -1, -1),
    ],
    ids=repr,
)
@world(3)
def test_inputs_and_outputs_are_laid_out_as_the_style_says(style: ParallelStyle, given: Any, part: Any) -> None:
    """A linear layer from 6 to 5 features, three examples, on three ranks."""

    def own(x: Tensor, how: Any, dim: int) -> Tensor:
        return local_shard_of(x, dim, 3, how) if isinstance(how, tuple) else local_shard_of(x, how, 3)

    torch.manual_seed(0)
    plain = nn.Linear(6, 5).double()
    module = parallelize_module(copy.deepcopy(plain), None, style)
    x = X.double()
    out = compare(module, plain, own(x, given, 0), x, lambda want: own(want, part, 1), lambda grad: own(grad, given, 0))
    assert type(out) is Tensor


@pytest.mark.parametrize("placement", [R, S0, S1, Partial()], ids=str)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@world(4)
def test_a_distributed_input_may_come_in_any_layout(style: type[ParallelStyle], placement: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 5)
    module = parallelize_module(copy.deepcopy(plain), None, style(use_local_output=False))  # type: ignore[call-arg]
    compare(module, plain, distribute_tensor(X, Mesh((4,)), [placement]), X, part_of_input=lambda grad: grad)


BAD: dict[str, tuple[nn.Module, ParallelStyle, str]] = {
    "another layer": (
        nn.Conv1d(2, 2, 1),
        ColwiseParallel(),
        "EmbeddingBag of torch.nn, not torch.nn.modules.conv.Conv1d",
    ),
    "unit": (nn.Linear(6, 10), ColwiseParallel(unit=4), "10 features are not a multiple of unit=4"),
    "no unit": (nn.Linear(6, 10), RowwiseParallel(unit=0), "6 features are not a multiple of unit=0"),
    "sizes": (nn.Linear(6, 10), ColwiseParallel(sizes=(5, 4)), r"sizes=\(5, 4\) must be 2 numbers that add up to 10"),
    "sizes in units": (
        nn.Linear(6, 10),
        RowwiseParallel(unit=3, sizes=(3, 3)),
        r"sizes=\(3, 3\) must be 2 numbers that add up to 2: 6 features in units of 3, on 2 ranks",
    ),
    "too many": (nn.Linear(6, 10), ColwiseParallel(sizes=(5, 4, 1)), "must be 2 numbers"),
    "axes": (nn.Linear(6, 10), ColwiseParallel(output_layouts=(S0, S1)), "are 2 placements, Mesh"),
}


@pytest.mark.parametrize("name", BAD)
@world(2)
def test_an_unsupported_module_or_option_raises_before_anything_changes(name: str) -> None:
    module, style, text = BAD[name]
    own = copy.deepcopy(module)
    with pytest.raises(PlanError, match=text):
        parallelize_module(own, None, {"": style})
    assert not any(isinstance(p, DTensor) for p in own.parameters())
    assert not own._forward_pre_hooks


def test_sizes_are_one_number_a_rank() -> None:
    for sizes in (3, ("a",), "33", (3.0, 3)):
        with pytest.raises(ArgumentError, match="sizes must be a sequence, each an integer or None, got"):
            ColwiseParallel(sizes=sizes)  # type: ignore[arg-type]


@world(2)
def test_a_local_output_of_a_column_parallel_layer_is_no_input_of_the_next_and_its_fixes_work() -> None:
    with pytest.raises(LayoutError) as caught:
        parallelize_module(Pair(8), None, {"up": ColwiseParallel(), "down": ColwiseParallel()})(X)
    assert str(caught.value) == (
        "the input of down must have 8 features in its last dim, got shape (3, 4): a plain tensor is laid out as "
        "[Replicate()] on Mesh(0=2). If it is the output of a column-parallel layer, it is a local shard. "
        "Fix: RowwiseParallel() for this layer; or ColwiseParallel(use_local_output=False) for the layer before it, "
        "which then returns a DTensor."
    )
    for up, down in [
        (ColwiseParallel(), RowwiseParallel()),
        (ColwiseParallel(use_local_output=False), ColwiseParallel(output_layouts=R)),
    ]:
        module = parallelize_module(Pair(8), None, {"up": up, "down": down})
        assert_close(full(module(X)), Pair(8)(X))
