"""How an op runs depends on its operands alone: not on what ran before, nor on what other ranks ran before."""

import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Mesh, Partial, Replicate, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise._layout import Layout
from shardwise._rules.registry import RULES, rule_of
from shardwise._tensor import tag
from shardwise._tensor.dispatch import dispatcher, resolve
from shardwise._tensor.dispatch.dispatcher import recipe_of
from shardwise.errors import RuleError
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tools import samples
from tools.op_judge import Sample
from tools.rows import written

S0, S1, R = Shard(0), Shard(1), Replicate()
LINE, GRID = Mesh((4,)), Mesh((2, 2))
FACTOR = 256  # from samples that cost less than a message to operands that cost more
LOOPS = {"rnn_tanh", "rnn_relu", "gru", "lstm"}  # on the meta device, torch runs them step by step
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Decision = tuple[object, ...]


def families() -> dict[object, list[Sample]]:
    """Samples of each function that makes rows, of different kinds of arguments."""
    found: dict[object, dict[object, Sample]] = {}
    for sample in written():
        if rule_of(sample.op) is None or getattr(sample.op, "__name__", "") in LOOPS:
            continue
        family = found.setdefault(samples.function_of(RULES[sample.op]), {})
        if len(family) < 3 and sample.tensors() and not any(0 in x.shape for x in sample.tensors()):
            family.setdefault((samples.bare_name(sample.op), samples.features_of(sample)), sample)
    return {family: list(chosen.values()) for family, chosen in found.items()}


def other_calls(sample: Sample) -> Iterator[Sample]:
    """The call with other sizes, or of another dtype."""
    yield sample.on([x.new_empty([n * FACTOR if n > 1 else n for n in x.shape]) for x in metas(sample)])
    yield sample.on([x.to(torch.float32) if x.dtype == torch.float64 else x for x in metas(sample)])


def metas(sample: Sample) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in sample.tensors()]


def on_layouts(sample: Sample, layouts: Sequence[Layout]) -> Call:
    """The call on DTensors of layouts of these kinds."""
    tensors = []
    for x, layout in zip(sample.tensors(), layouts, strict=True):
        fitting = Layout(layout.mesh, layout.kind[1], x.shape, layout.shard_order)  # type: ignore[arg-type]
        tensors.append(tag(torch.empty(fitting.local_shape(0), dtype=x.dtype, device="meta"), fitting))
    call = sample.on(tensors)
    return call.op, call.args, call.kwargs


def decided(calls: Iterable[Call]) -> list[Decision]:
    """How each call is to run, if they are made in this order in a new process."""
    dispatcher.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [decision(*call) for call in calls]


def decision(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Decision:
    try:
        recipe = recipe_of(op, args, kwargs)
    except RuleError as error:
        return type(error), str(error)
    except Exception as error:  # noqa: BLE001 - torch refuses these sizes
        return (type(error),)
    return recipe.redistributed, recipe.layouts, recipe.local_axes, recipe.output, recipe.cause.why, recipe.copied


def is_recipe(found: Decision) -> bool:
    return len(found) > 2


def any_layouts(sample: Sample, mesh: Mesh, rng: random.Random) -> list[Layout]:
    """A layout for each operand, seldom one that a row has."""
    choices = [[R, *map(Shard, range(x.ndim)), *[Partial()] * x.is_floating_point()] for x in sample.tensors()]
    return [
        Layout(mesh, rng.choices(options, k=mesh.ndim), x.shape)
        for options, x in zip(choices, sample.tensors(), strict=True)
    ]


@pytest.mark.slow
def test_no_family_of_rules_runs_a_call_otherwise_after_calls_of_other_sizes_or_dtypes() -> None:
    compared, by_size = set(), set()
    for number, (family, members) in enumerate(families().items()):
        rng = random.Random(number)
        for sample in members:
            for mesh in (LINE, GRID, LINE):
                layouts = any_layouts(sample, mesh, rng)
                calls = [on_layouts(other, layouts) for other in (sample, *other_calls(sample))]
                first, *others = decided(calls)
                assert decided(reversed(calls)) == [*others[::-1], first], (str(sample), layouts)
                compared |= {family} if is_recipe(first) and is_recipe(others[0]) else set()
                by_size |= {family} if is_recipe(first) and is_recipe(others[0]) and first[4] != others[0][4] else set()
    assert len(compared) > 70, len(compared)
    assert len(by_size) > 10, len(by_size)


def sent_by(*sizes: tuple[int, int, int]) -> list[tuple[object, int]]:
    """The placements and the bytes of a product for each of these sizes, in this order in a new process."""

    def run() -> list[tuple[object, int]]:
        found: list[tuple[object, int]] = []
        for rows, inner, columns in sizes:
            x, weight = (distribute_tensor(torch.ones(n, m), LINE, [S0]) for n, m in ((rows, inner), (inner, columns)))
            with count_comms() as comms:
                out = torch.mm(x, weight)
            found.append((as_dtensor(out).placements, comms.total_bytes))
        return found

    dispatcher.forget()
    return world(4).run(run)[0]


def test_a_small_first_batch_does_not_decide_how_later_ones_run() -> None:
    small, large = (4, 8, 8), (512, 256, 16)
    assert sent_by(small, large) == sent_by(large, small)[::-1]
    assert sent_by(large, large) == sent_by(large) * 2


@pytest.mark.parametrize("shape", [(), (0, 1, 7), (8, 9, 10), (1000, 4095)])
def test_a_size_class_has_three_bits_of_each_size(shape: tuple[int, ...]) -> None:
    for size, found in zip(shape, resolve.size_class(shape), strict=True):
        assert found <= size < found * 1.25 or size == found
        assert bin(found).rstrip("0").count("1") <= 3
        assert resolve.size_class((found,)) == (found,)


def _after_another_history() -> Tensor:
    """A large product, after a small one that rank 0 has forgotten."""
    mesh = Mesh((2,))
    for rows, inner in ((4, 8), (512, 256)):
        x = distribute_tensor(torch.arange(rows * inner).view(rows, inner) % 7 + 0.0, mesh, [S0])
        weight = distribute_tensor(torch.arange(inner * 16).view(inner, 16) % 5 + 0.0, mesh, [S0])
        product = torch.mm(x, weight)
        if collectives.rank() == 0:
            dispatcher.forget()  # as if other work had filled the cache
    return as_dtensor(product).full_tensor()


@pytest.mark.processes
def test_a_rank_that_has_forgotten_its_choices_chooses_as_the_others() -> None:
    (first, second) = world(2, real=True).run(_after_another_history)
    x, weight = torch.arange(512 * 256).view(512, 256) % 7 + 0.0, torch.arange(256 * 16).view(256, 16) % 5 + 0.0
    assert torch.equal(first, x @ weight)
    assert torch.equal(second, x @ weight)
