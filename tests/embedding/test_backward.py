"""What programs do around a step: part of the results, several graphs, no graph, other modes, inputs of other kinds."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, Placement, Replicate, Shard
from shardwise.embedding import (
    SGD,
    Adagrad,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    RowWiseAdam,
    shard_embeddings,
)
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import RuleError
from shardwise.testing import world
from tests.embedding.kernel_cases import KERNELS

SIZE = 2
ROWS = {"fa": 11, "fb": 7, "fc": 7, "fd": 5}
PLAN: dict[str, Placement] = {"a": Shard(0), "b": Shard(1), "c": Replicate()}
OPTIMIZERS: Sequence[RowOptimizer | None] = (SGD(0.1), Adagrad(0.1), RowWiseAdagrad(0.1), Adam(0.1), RowWiseAdam(0.1))


def collection(pooled: bool = True) -> EmbeddingBagCollection | EmbeddingCollection:
    torch.manual_seed(3)
    shapes: list[tuple[int, int, str, list[str]]] = [
        (11, 4, "a", ["fa"]),
        (7, 6, "b", ["fb", "fc"]),
        (5, 3, "c", ["fd"]),
    ]
    if not pooled:
        return EmbeddingCollection([EmbeddingConfig(r, d, name, feature_names=f) for r, d, name, f in shapes])
    kinds = (PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(rows, dim, name, feature_names=features, pooling=kind)
            for (rows, dim, name, features), kind in zip(shapes, kinds, strict=True)
        ]
    )


def sharded(
    optimizer: RowOptimizer | None = RowWiseAdagrad(0.1),  # noqa: B008
    pooled: bool = True,
    kernels: Kernels = KERNELS[0],
) -> Any:
    return shard_embeddings(collection(pooled), PLAN, Mesh((SIZE,)), optimizer, kernels=kernels)


def batch(step: int = 0, rank: int | None = None) -> KeyedJaggedTensor:
    rank = collectives.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [torch.randint(0, 4, (3,), generator=generator) for _ in ROWS]
    ids = [
        torch.randint(rows, (int(n.sum()),), generator=generator)
        for rows, n in zip(ROWS.values(), lengths, strict=True)
    ]
    return KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=torch.cat(lengths))


def flat(out: Any) -> Tensor:
    parts = out.values() if isinstance(out, dict) else [out]
    return torch.cat([part.values().reshape(-1) for part in parts])


def tables(module: nn.Module) -> list[Tensor]:
    return [value.full_tensor().clone() for value in module.state_dict().values()]


def gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad.full_tensor() for parameter in module.parameters()]  # type: ignore[union-attr]


def trained(module: Any) -> list[Tensor]:
    return tables(module) if module.fused_optimizer is not None else gradients(module)


def equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def of_one_process(*losses: Callable[[Tensor], Tensor], pooled: bool = True) -> list[Tensor]:
    """The gradients of the tables, of the sum of the losses of steps 0, 1, … of all ranks."""
    plain = collection(pooled)
    for step, loss in enumerate(losses):
        for rank in range(SIZE):
            loss(flat(plain(batch(step, rank)))).backward()
    return [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]


both = pytest.mark.parametrize("pooled", [True, False])


# ---- graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(0.1), None])
@both
@world(SIZE)
def test_a_second_backward_is_an_error_and_changes_nothing(optimizer: RowOptimizer | None, pooled: bool) -> None:
    module = sharded(optimizer, pooled)
    loss = flat(module(batch())).sum()
    loss.backward()
    before = trained(module)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert equal(trained(module), before)


@world(SIZE)
def test_a_retained_graph_adds_its_gradients_again() -> None:
    module = sharded(None)
    loss = flat(module(batch())).sum()
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
    losses = [flat(module(batch(step))).square().sum() for step in range(2)]
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
    (out["fb"] if pooled else out["fb"].values()).sum().backward()
    for rank in range(SIZE):
        out = plain(batch(0, rank))
        (out["fb"] if pooled else out["fb"].values()).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(tables(module), list(plain.state_dict().values()))


@world(SIZE)
def test_a_lookup_without_backward_or_with_one_that_fails_leaves_no_trace() -> None:
    module, other = sharded(), sharded()
    module(batch(5))
    out = flat(module(batch(6)))
    out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    for one in module, other:
        flat(one(batch())).square().sum().backward()
    assert equal(tables(module), tables(other))


@both
@world(SIZE)
def test_second_derivatives_are_refused(pooled: bool) -> None:
    module = sharded(None, pooled)
    with pytest.raises(RuleError, match="Gradients of the tables of a sharded collection have no gradients"):
        flat(module(batch())).square().sum().backward(create_graph=True)
    flat(module(batch())).sum().backward()


@world(SIZE)
def test_gradients_of_something_else_leave_the_tables() -> None:
    module, factor = sharded(), torch.ones((), requires_grad=True)
    before = tables(module)
    torch.autograd.grad((flat(module(batch())) * factor).sum(), [factor])
    assert equal(tables(module), before)


# ---- gradients of parameters, without a fused optimizer ---------------------------------------------------------


@world(SIZE)
def test_frozen_tables_get_no_gradient() -> None:
    module = sharded(None)
    module.embedding_bags["a"].weight.requires_grad_(False)
    flat(module(batch())).sum().backward()
    assert [parameter.grad is None for parameter in module.parameters()] == [True, False, False]
    module.requires_grad_(False)
    assert not flat(module(batch())).requires_grad


# ---- modes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both
@world(SIZE)
def test_lookups_without_gradients_between_steps(mode: Callable[[], Any], pooled: bool) -> None:
    module, other = sharded(pooled=pooled), sharded(pooled=pooled)
    with mode():
        out, later = module(batch()), batch(1)
    assert not flat(out).requires_grad
    for one in module, other:
        flat(one(later)).square().sum().backward()
        flat(one(batch())).square().sum().backward()
    assert equal(tables(module), tables(other))


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, None])
@both
@world(SIZE)
def test_autocast_changes_neither_sums_nor_updates(optimizer: RowOptimizer | None, pooled: bool) -> None:
    module, other = sharded(optimizer, pooled), sharded(optimizer, pooled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flat(module(batch()))
        out.square().sum().backward()
    expected = flat(other(batch()))
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
            return flat(of(features)).tanh() * one

        found = torch.utils.checkpoint.checkpoint(results, module, batch(step), one, use_reentrant=use_reentrant)
        found.square().sum().backward()
        results(other, batch(step), one).square().sum().backward()
    torch.testing.assert_close(trained(module), trained(other))


# ---- inputs ------------------------------------------------------------------------------------------------------


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
        [KeyedJaggedTensor(["z"], torch.tensor([99]), lengths=torch.tensor([0, 1, 0])), x]
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
    out, expected = flat(module(given)), flat(other(batch()))
    assert torch.equal(out, expected)
    assert equal((given.values(), given.lengths()), before)
    given.values().zero_()  # after the lookup, backward does not read them
    out.square().sum().backward()
    expected.square().sum().backward()
    assert equal(tables(module), tables(other))
