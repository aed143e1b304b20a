"""What programs do around a step: part of the results, several graphs, no graph, other modes, inputs of other kinds."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise.embedding import SGD, Adagrad, Adam, KeyedJaggedTensor, RowWiseAdagrad, RowWiseAdam
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import RuleError
from shardwise.testing import world
from tests.embedding import tables
from tests.embedding.kernel_cases import KERNELS
from tests.embedding.tables import batch_of, collection, equal, tables_of, values_of

SIZE = 2
OPTIMIZERS: Sequence[RowOptimizer | None] = (SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1))


def sharded(optimizer: RowOptimizer | None = RowWiseAdagrad(0.1), pooled: bool = True, **options: Any) -> Any:  # noqa: B008
    return tables.sharded("mixed", SIZE, optimizer, pooled, **options)


def batch(step: int = 0, rank: int | None = None) -> KeyedJaggedTensor:
    return batch_of(collectives.rank() if rank is None else rank, step)


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.full_tensor() for parameter in module.parameters()]  # type: ignore[union-attr]


def trained(module: Any) -> list[Tensor]:
    return tables_of(module) if module.fused_optimizer is not None else gradients(module)


def of_one_process(*losses: Callable[[Tensor], Tensor], pooled: bool = True) -> list[Tensor]:
    """The gradients of the tables, of the sum of the losses of steps 0, 3, … of all ranks."""
    plain = collection(pooled)
    for number, loss in enumerate(losses):
        for rank in range(SIZE):
            loss(values_of(plain(batch(3 * number, rank)))).backward()
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


both = pytest.mark.parametrize("pooled", [True, False])


# ---- graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(0.1), None])
@both
@world(SIZE)
def test_a_second_backward_is_an_error_and_changes_nothing(optimizer: RowOptimizer | None, pooled: bool) -> None:
    module = sharded(optimizer, pooled)
    loss = values_of(module(batch())).sum()
    loss.backward()
    before = trained(module)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert equal(trained(module), before)


@world(SIZE)
def test_a_retained_graph_adds_its_gradients_again() -> None:
    module = sharded(None)
    loss = values_of(module(batch())).sum()
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in gradients(module)]
    loss.backward()
    assert equal(gradients(module), [2 * gradient for gradient in once])


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("optimizer", [SGD(0.1), None])
@both
@world(SIZE)
def test_two_lookups_before_their_backwards_in_any_order(
    optimizer: RowOptimizer | None, last_first: bool, pooled: bool
) -> None:
    module = sharded(optimizer, pooled)
    losses = [values_of(module(batch(step))).square().sum() for step in (0, 3)]
    for loss in losses[::-1] if last_first else losses:  # an update must not change the gradient of the other loss
        loss.backward()
    expected = of_one_process(lambda x: x.square().sum(), lambda x: x.square().sum(), pooled=pooled)
    if optimizer is not None:
        expected = [t - 0.1 * g for t, g in zip(collection(pooled).parameters(), expected, strict=True)]
    torch.testing.assert_close(trained(module), expected)


@both
@world(SIZE)
def test_part_of_the_results(pooled: bool) -> None:
    module, plain = sharded(SGD(0.1), pooled), collection(pooled)
    out = module(batch())
    (out["f1"] if pooled else out["f1"].values()).sum().backward()
    for rank in range(SIZE):
        out = plain(batch(0, rank))
        (out["f1"] if pooled else out["f1"].values()).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(tables_of(module), list(plain.state_dict().values()))


@world(SIZE)
def test_a_lookup_without_backward_or_with_one_that_fails_leaves_no_trace() -> None:
    module, other = sharded(), sharded()
    module(batch(5))
    out = values_of(module(batch(6)))
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    for one in module, other:
        values_of(one(batch())).square().sum().backward()
    assert equal(tables_of(module), tables_of(other))


@both
@world(SIZE)
def test_second_derivatives_are_refused(pooled: bool) -> None:
    module = sharded(None, pooled)
    with pytest.raises(RuleError, match="Gradients of the tables of a sharded collection have no gradients"):
        values_of(module(batch())).square().sum().backward(create_graph=True)
    values_of(module(batch())).sum().backward()


@world(SIZE)
def test_gradients_of_something_else_leave_the_tables() -> None:
    module, factor = sharded(), torch.ones((), requires_grad=True)
    before = tables_of(module)
    torch.autograd.grad((values_of(module(batch())) * factor).sum(), [factor])
    assert equal(tables_of(module), before)


@world(SIZE)
def test_frozen_tables_get_no_gradient() -> None:
    module = sharded(None)
    module.embedding_bags["t0"].weight.requires_grad_(False)
    values_of(module(batch())).sum().backward()
    assert [parameter.grad is None for parameter in module.parameters()] == [True, False, False]
    module.requires_grad_(False)
    assert not values_of(module(batch())).requires_grad


# ---- modes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both
@world(SIZE)
def test_lookups_without_gradients_between_steps(mode: Callable[[], Any], pooled: bool) -> None:
    module, other = sharded(pooled=pooled), sharded(pooled=pooled)
    with mode():
        out, later = module(batch()), batch(3)
    assert not values_of(out).requires_grad
    for one in module, other:
        values_of(one(later)).square().sum().backward()
        values_of(one(batch())).square().sum().backward()
    assert equal(tables_of(module), tables_of(other))


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
@both
@world(SIZE)
def test_autocast_changes_neither_sums_nor_updates(optimizer: RowOptimizer | None, pooled: bool) -> None:
    module, other = sharded(optimizer, pooled), sharded(optimizer, pooled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = values_of(module(batch()))
        out.square().sum().backward()
    expected = values_of(other(batch()))
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert equal(trained(module), trained(other))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(0.1), None])
@world(SIZE)
def test_activation_checkpoints_compute_the_results_again(optimizer: RowOptimizer | None, use_reentrant: bool) -> None:
    module, other = sharded(optimizer), sharded(optimizer)
    one = torch.ones((), requires_grad=True)
    for step in range(2):

        def results(of: Any, features: KeyedJaggedTensor, one: Tensor) -> Tensor:
            return values_of(of(features)).tanh() * one

        found = torch.utils.checkpoint.checkpoint(results, module, batch(step), one, use_reentrant=use_reentrant)
        found.square().sum().backward()
        results(other, batch(step), one).square().sum().backward()
    torch.testing.assert_close(trained(module), trained(other))


def interleaved(x: Tensor) -> Tensor:
    return torch.stack([x, -x - 1], 1)[:, 0]


INPUTS: dict[str, Callable[[KeyedJaggedTensor], KeyedJaggedTensor]] = {
    "not contiguous": lambda x: KeyedJaggedTensor(x.keys(), interleaved(x.values()), lengths=interleaved(x.lengths())),
    "int32": lambda x: KeyedJaggedTensor(x.keys(), x.values().int(), lengths=x.lengths().int()),
    "int32 on one rank": lambda x: INPUTS["int32"](x) if collectives.rank() else x,
    "offsets": lambda x: KeyedJaggedTensor(x.keys(), x.values(), offsets=x.offsets()),
    "views of features": lambda x: KeyedJaggedTensor.concat([*x.split([1, 2, 1])[::-1]]),
    "permuted": lambda x: x.permute([3, 1, 0, 2]),
    "a view of more features": lambda x: KeyedJaggedTensor.concat(
        [KeyedJaggedTensor(["z"], torch.tensor([99]), lengths=torch.tensor([0, 1])), x]
    ).split([1, 4])[1],
}


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.name)
@pytest.mark.parametrize("kind", INPUTS)
@both
@world(SIZE)
def test_inputs_of_any_form_are_looked_up_and_stay_as_they_are(kind: str, pooled: bool, kernels: Kernels) -> None:
    module, other = (sharded(pooled=pooled, kernels=kernels) for _ in range(2))
    given = INPUTS[kind](batch())
    before = given.values().clone(), given.lengths().clone()
    out, expected = values_of(module(given)), values_of(other(batch()))
    assert torch.equal(out, expected)
    assert equal((given.values(), given.lengths()), before)
    given.values().zero_()  # after the lookup, backward does not read them
    out.square().sum().backward()
    expected.square().sum().backward()
    assert equal(tables_of(module), tables_of(other))
