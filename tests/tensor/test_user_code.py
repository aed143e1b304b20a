"""Where user code meets the engine, modules and torch's own transformations: it sees the whole tensor there too."""

import copy
import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from shardwise import DTensor, Mesh, Placement, Replicate, Shard, distribute_tensor, shard_module
from shardwise import _collectives as collectives
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor

S0, S1, R = Shard(0), Shard(1), Replicate()
UNEVEN = Shard(0, [1, 0, 6])
FULL = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PLACEMENTS: list[Placement] = [S0, S1, R, UNEVEN]


def leaf(placement: Placement, full: Tensor = FULL) -> DTensor:
    return distribute_tensor(full, Mesh((3,)), [placement]).requires_grad_()


def full_value(x: Any) -> Tensor:
    return as_dtensor(x).full_tensor()


def linear(placement: Placement) -> tuple[nn.Linear, nn.Linear]:
    """A sharded layer, and the plain one it was made from."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 4).double()
    return shard_module(copy.deepcopy(plain), {"weight": placement}, mesh=Mesh((3,))), plain


class ScaledBySum(torch.autograd.Function):
    """Not element by element, so what a rank holds alone gives another answer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, power: int) -> Tensor:
        out = x * w.sum() ** power
        ctx.save_for_backward(x, w, out)
        ctx.power = power
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w, out = ctx.saved_tensors
        assert out.shape == x.shape
        (g,) = grads
        slope = ctx.power * w.sum() ** (ctx.power - 1)
        return g * w.sum() ** ctx.power, (g * x).sum() * slope * torch.ones_like(w), None


class InTwoSteps(ScaledBySum):
    @staticmethod
    def forward(x: Tensor, w: Tensor, power: int) -> Tensor:  # type: ignore[override]
        return x * w.sum() ** power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2], output)
        ctx.power = inputs[2]


@pytest.mark.parametrize("function", [ScaledBySum, InTwoSteps])
@pytest.mark.parametrize("w_at", PLACEMENTS, ids=str)
@pytest.mark.parametrize("x_at", PLACEMENTS, ids=str)
@world(3)
def test_a_custom_function_sees_whole_tensors_forward_and_backward(x_at: Any, w_at: Any, function: Any) -> None:
    x, w = leaf(x_at), leaf(w_at, FULL[:, :2].clone())
    out = function.apply(x, w, 2)
    out.sin().sum().backward()
    px, pw = FULL.clone().requires_grad_(), FULL[:, :2].clone().requires_grad_()
    expected = px * pw.sum() ** 2
    expected.sin().sum().backward()
    for found, wanted in ((out, expected), (x.grad, px.grad), (w.grad, pw.grad)):
        assert_close(full_value(found), wanted)
    plain = FULL[:, :2].clone().requires_grad_()
    function.apply(leaf(x_at), plain, 1).sum().backward()
    assert_close(plain.grad, FULL.sum().expand(7, 2))


class Swapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@world(3)
def test_inputs_that_a_function_returns_keep_their_layouts_where_gradients_are_disabled(mode: Any) -> None:
    swapped: Any = Swapped
    with mode():
        found = swapped.apply(leaf(S0), leaf(R))
    for x, placement in zip(found, (R, S0), strict=True):
        assert as_dtensor(x).placements == (placement,)
        assert_close(full_value(x), FULL)


class OfClosure(torch.autograd.Function):
    """f(x), whatever tensors f holds; backward uses what forward saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Any) -> Any:
        out = f(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        return (grad * out).sum() * x + grad.sum(), None


@pytest.mark.parametrize("reentrant_checkpoint", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@world(3)
def test_functions_of_plain_tensors_that_return_distributed_ones_get_whole_gradients(
    placement: Placement, reentrant_checkpoint: bool
) -> None:
    weight = FULL.clone()

    def gradients(w: Tensor) -> list[Any]:
        x = torch.linspace(0, 1, 14, dtype=FULL.dtype).reshape(2, 7).requires_grad_()
        layer = lambda t: (t @ w).sin()  # noqa: E731
        apply: Any = OfClosure.apply
        out = checkpoint(layer, x, use_reentrant=True) if reentrant_checkpoint else apply(x, layer)
        out.square().sum().backward()
        return [x.grad] + ([w.grad] if reentrant_checkpoint else [])

    expected = gradients(weight.clone().requires_grad_(reentrant_checkpoint))
    w = distribute_tensor(weight, placements=[placement]).requires_grad_(reentrant_checkpoint)
    for got, want in zip(gradients(w), expected, strict=True):
        assert_close(got.full_tensor() if isinstance(got, DTensor) else got, want)


@pytest.mark.parametrize("placement", PLACEMENTS[:3], ids=str)
@world(3)
def test_full_backward_hooks_of_modules_see_and_return_whole_gradients(placement: Placement) -> None:
    layer, plain = linear(S0)
    seen: dict[str, Any] = {}

    def hook_of(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
            seen[name] = grad_in[0].sum(), grad_out[0].sum(0)
            return (grad_in[0] * grad_in[0].abs().max(),)

        return hook

    def tripled(module: nn.Module, grad_out: Any) -> Any:
        return (grad_out[0] * 3,)

    for name, m in (("sharded", layer), ("plain", plain)):
        m.register_full_backward_pre_hook(tripled)
        m.register_full_backward_hook(hook_of(name))
    x, px = leaf(placement), FULL.clone().requires_grad_()
    layer(x).square().sum().backward()
    plain(px).square().sum().backward()
    found = *seen["sharded"], x.grad, layer.weight.grad
    for got, want in zip(found, (*seen["plain"], px.grad, plain.weight.grad), strict=True):
        assert_close(full_value(got), want)


@world(3)
def test_hooks_on_several_tensors_wait_for_all_and_functional_calls_and_jacobians_work() -> None:
    x, w = leaf(R), leaf(S0)
    seen: list[Any] = []
    torch.autograd.graph.register_multi_grad_hook((x, w), seen.append)
    (x * w).sum().backward()
    ((of_x, of_w),) = seen
    assert_close(full_value(of_x), FULL)
    assert_close(full_value(of_w), FULL)
    layer, plain = linear(S0)
    doubled = {name: p * 2 for name, p in layer.named_parameters()}
    out = torch.func.functional_call(layer, doubled, (leaf(S0),))
    want = torch.func.functional_call(plain, {name: p * 2 for name, p in plain.named_parameters()}, (FULL,))
    assert_close(full_value(out), want)
    jacobian = torch.autograd.functional.jacobian(lambda t: t.sum(0), leaf(S1).detach())
    assert_close(full_value(jacobian), torch.autograd.functional.jacobian(lambda t: t.sum(0), FULL))


@world(3)
def test_data_and_storage_may_be_set_from_any_layout_and_data_from_a_plain_whole() -> None:
    x, y = leaf(UNEVEN), leaf(UNEVEN).detach()
    x.data = leaf(S1).detach() * 2
    y.set_(leaf(S1).detach() * 2)
    for changed in (x, y):
        assert changed.placements == (UNEVEN,)
        assert_close(changed.full_tensor(), FULL * 2)
    x.data = FULL * 3
    assert x.placements == (UNEVEN,)
    assert_close(x.full_tensor(), FULL * 3)
    with pytest.raises(RuleError, match=r"\.data = expects a tensor of the shape of the DTensor"):
        x.data = FULL[:2]
    with pytest.raises(RuleError, match="local_map"):
        y.set_(torch.ones(7, 3))


@world(3)
def test_parametrized_parameters_train_and_parameters_go_to_a_vector_and_back() -> None:
    class Tanh(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.tanh()

    layer, plain = linear(S1)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    assert_close(full_value(vector), nn.utils.parameters_to_vector(plain.parameters()))
    nn.utils.vector_to_parameters(vector * 2, layer.parameters())
    assert as_dtensor(layer.weight).placements == (S1,)
    assert_close(full_value(layer.weight), plain.weight.detach() * 2)
    layer, plain = linear(S0)
    for m in (layer, plain):
        nn.utils.parametrize.register_parametrization(m, "weight", Tanh())
    layer(leaf(S0)).sum().backward()
    plain(FULL).sum().backward()
    assert_close(full_value(layer.parametrizations.weight.original.grad), plain.parametrizations.weight.original.grad)  # type: ignore[union-attr]


@world(3)
def test_plain_states_load_into_sharded_modules_and_back() -> None:
    for placement in PLACEMENTS[:3]:
        layer, plain = linear(placement)
        with torch.no_grad():
            plain.weight.mul_(2)
        layer.load_state_dict(plain.state_dict())
        assert isinstance(layer.state_dict()["weight"], DTensor)
        assert as_dtensor(layer.weight).layout_.kind[1] == (placement,)
        assert_close(full_value(layer.weight), plain.weight.detach())
        other = nn.Linear(3, 4).double()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(other.weight, plain.weight)
        with pytest.raises(RuntimeError, match="size mismatch"):
            layer.load_state_dict({"weight": FULL, "bias": plain.bias})
        with pytest.raises(RuleError, match=r"cannot be pickled.*shardwise\.checkpoint"):
            torch.save(layer.state_dict(), io.BytesIO())


@world(3)
def test_dtypes_change_and_leaves_in_place_without_grad_only() -> None:
    layer, plain = linear(S0)
    assert layer.half().weight.dtype == torch.float16
    assert isinstance(layer.to("cpu", torch.float32).weight, nn.Parameter)
    assert as_dtensor(layer.weight).placements == (S0,)
    assert_close(full_value(layer.weight), plain.weight.detach().half().float())
    values = torch.arange(5.0)
    x = distribute_tensor(values, placements=[S0]).requires_grad_()
    assert x.type() == values.type()
    x.type(torch.float64).square().sum().backward()
    assert_close(full_value(x.grad), 2 * values)
    x = leaf(S0)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        x.add_(1)
    with pytest.raises(RuntimeError, match="view of a leaf Variable"):
        x.view(-1).add_(1)
    with torch.no_grad():
        x.view(-1).add_(1)
    assert_close(x.full_tensor(), FULL + 1)
    y = x * 2
    assert y.detach_() is y
    assert not y.requires_grad
    with torch.inference_mode():
        out = (x.softmax(0) @ x.mT).sum(0)
    assert_close(full_value(out), ((FULL + 1).softmax(0) @ (FULL + 1).mT).sum(0))


@world(2)
def test_in_place_activations_change_their_input() -> None:
    for function in (F.silu, F.elu, F.celu, F.selu, F.mish, F.hardsigmoid, F.leaky_relu, F.relu):
        x = DTensor.from_local(FULL.clone(), Mesh((2,)), [S0])
        assert function(x, inplace=True) is x
        assert_close(x.full_tensor(), torch.cat([function(FULL), function(FULL)]))


def test_kernels_of_jiterator_are_refused() -> None:
    double = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")

    @world(2)
    def refused() -> None:
        with pytest.raises(RuleError, match=r"^A kernel of torch.cuda.jiterator would use the local tensor"):
            double(distribute_tensor(FULL, Mesh((2,)), [S0]))

    refused()
    with pytest.raises(AssertionError if not torch.cuda.is_available() else RuntimeError):
        double(FULL)  # of a CPU


def test_a_gradient_that_crossed_a_border_crosses_it_again() -> None:
    """A second derivative, with respect to parts that are plain and to a DTensor between."""
    first, second = torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    x, w = first.clone().requires_grad_(), second.clone().requires_grad_()
    (g,) = torch.autograd.grad((x @ w).pow(3).sum(), x, create_graph=True)
    g.square().sum().backward()
    slope, of_x, of_w = g.detach(), x.grad, w.grad

    def body() -> None:
        mesh = Mesh((collectives.world_size(),))
        for given, held in product((R, S0, S1), (R, S0, S1)):

            def part(x: Tensor | None, given: Placement = given) -> Tensor:
                assert x is not None
                return distribute_tensor(x, mesh, [given]).to_local().clone()

            local, weight = part(first).requires_grad_(), distribute_tensor(second, mesh, [held]).requires_grad_()
            cubes: Any = (DTensor.from_local(local, mesh, [given], shape=(5, 4)) @ weight).pow(3)
            out = cubes.redistribute(mesh, [given]).to_local()
            (found,) = torch.autograd.grad(out.sum(), local, create_graph=True)
            assert_close(found, part(slope))
            found.square().sum().backward()
            assert_close(local.grad, part(of_x))
            assert_close(full_value(weight.grad), of_w)

    for ranks in (2, 3):
        world(ranks).run(body)


@world(3)
def test_a_function_that_fills_a_buffer_of_its_own_is_refused_if_it_needs_gradients() -> None:
    """Autograd would see each write twice, and the second time without the tensor that is written."""
    for placement in (S0, R, UNEVEN):
        x = leaf(placement, FULL[:, 0].clone())
        assert_close(torch.vander(x.detach()), torch.vander(FULL[:, 0]))
        with pytest.raises(RuleError, match="writes a DTensor into a plain tensor of its own"):
            torch.vander(x)


@pytest.mark.filterwarnings("ignore:non-inplace resize")
@world(3)
def test_resized_tensors_have_gradients() -> None:
    for placement, shape in product(PLACEMENTS, ((3, 7), (21,))):
        x = leaf(placement)
        y = x.resize(*shape) if len(shape) > 1 else x.resize_as(torch.zeros(shape))  # type: ignore[no-untyped-call]
        as_dtensor(y.square().sum()).backward()
        assert_close(full_value(x.grad), 2 * FULL)
