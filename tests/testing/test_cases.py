# ruff: noqa: PT009 - unittest's way of asserting is what is tested
"""Test cases on ranks: what they offer, and what they report when a rank fails. Users' runs are in test_runners."""

import sys
import threading
import unittest
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from shardwise import DTensor, Replicate, Shard, distribute_tensor, rank, world_size
from shardwise._collectives import all_reduce, barrier
from shardwise.testing import NUM_DEVICES, DTensorOpTestBase, DTensorTestBase, skip_unless_torch_gpu, with_comms
from shardwise.testing.assertions import TensorAssertions

pytestmark = pytest.mark.processes

PAIR = (0, 1)


class Contract:
    """What holds on both bases; the attributes that setUp makes are copies on each rank."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self.expected = torch.arange(12.0).view(6, 2)
        self.layer = nn.Linear(2, 2)
        self.weight = self.layer.weight
        self.lock = threading.Lock()

    @property
    def world_size(self) -> int:
        return 2

    @with_comms
    def test_each_rank_knows_who_it_is(self: Any) -> None:
        assert (self.rank, self.world_size) == (rank(), world_size())
        assert all_reduce(torch.tensor([float(self.rank)]), "sum", PAIR).tolist() == [1.0]

    @with_comms
    def test_a_mesh_of_all_ranks_takes_tensors(self: Any) -> None:
        x = distribute_tensor(self.expected, self.build_device_mesh(), [Shard(0)])
        assert x.to_local().shape == (3, 2)
        self.assertEqual(x.sum(0), self.expected.sum(0))
        self.assertEqual(self.device_type, x.device.type)

    @with_comms()
    def test_with_comms_takes_no_arguments_or_torch_s(self: Any) -> None:
        self._test_op(self.build_device_mesh(), torch.add, self.expected, other=self.expected)

    def test_a_difference_names_the_placements(self: Any) -> None:
        def wrong_where_sharded(x: Any, y: Any) -> Any:
            return x + y if getattr(x, "placements", (Replicate(),)) == (Replicate(),) else x - y

        with pytest.raises(AssertionError) as raised:
            self._test_op(self.build_device_mesh(), wrong_where_sharded, torch.ones(4, 2), torch.ones(4, 2))
        assert raised.value.__notes__[0] == "with placements [Shard(0)], [Replicate()]"

    @with_comms(eager_init=True, backend="gloo")
    def test_subtests_run_for_every_combination(self: Any) -> None:
        seen: list[tuple[int, str, int]] = []
        self.run_subtests({"a": [1, 2], "b": ["x", "y"]}, lambda k, a, b: seen.append((a, b, k)), 7)
        assert seen == [(1, "x", 7), (1, "y", 7), (2, "x", 7), (2, "y", 7)]

    def test_ranks_change_only_their_own_copies_of_what_setup_made(self: Any) -> None:
        assert self.layer.weight is self.weight
        with torch.no_grad():
            self.expected.fill_(self.rank)
        barrier(PAIR)
        assert self.expected.unique().tolist() == [self.rank]

    def test_what_cannot_be_pickled_is_named_where_it_is_used(self: Any) -> None:
        with pytest.raises(AttributeError, match=r"'lock' was made where .* cannot be sent to the ranks \(TypeError"):
            self.lock.acquire()
        with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
            self.nothing()

    def test_ranks_draw_the_same_numbers_in_every_run(self: Any) -> None:
        torch_kit_seed = 1234
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(torch_kit_seed)))


class TestProcesses(Contract, DTensorTestBase):
    def test_torch_s_own_world_is_there(self) -> None:
        self.init_pg()
        assert torch.distributed.get_rank() == self.rank
        self.destroy_pg()

    def test_other_backends_are_refused_with_the_way_to_them(self) -> None:
        with pytest.raises(RuntimeError, match="Backend mpi not supported"):
            self.init_pg(backend="mpi")
        if not torch.cuda.is_available():
            with pytest.raises(unittest.SkipTest, match="Need at least 2 CUDA devices"):
                self.init_pg(backend="nccl")

    def test_a_test_may_end_the_world(self) -> None:
        torch.distributed.destroy_process_group()
        with pytest.raises(RuntimeError, match="has left its world"):
            self.init_pg()


class TestSimulated(Contract, DTensorOpTestBase):
    left: ClassVar[list[int]] = []

    def perThreadSetUp(self) -> None:  # noqa: N802 - torch's name
        self.mine = self.rank + 10

    def perThreadTearDown(self) -> None:  # noqa: N802 - torch's name
        TestSimulated.left.append(self.rank)

    def test_each_rank_has_its_own_setup_and_cleanup(self) -> None:
        assert self.mine == self.rank + 10
        self.addCleanup(TestSimulated.left.append, -self.rank)
        assert self.left == ([] if self.rank == 0 else [0, 0])

    def tearDown(self) -> None:
        assert {rank for rank in self.left if rank >= 0} <= {0, 1}
        TestSimulated.left.clear()


# ---- reports of failures -----------------------------------------------------------------------------------------


class Failing:
    """Each test fails in its way; none is collected by itself."""

    __test__ = False
    timeout = 60.0

    @property
    def world_size(self) -> int:
        return 2

    @with_comms
    def raises(self: Any) -> None:
        if self.rank == 1:
            raise KeyError("boom")
        barrier(PAIR)

    def exits(self: Any) -> None:
        if self.rank == 1:
            sys.exit(3)
        barrier(PAIR)

    def skips_alone(self: Any) -> None:
        if self.rank == 1:
            self.skipTest("odd ranks do not")

    def subtest(self: Any) -> None:
        self.run_subtests({"a": [1, 2]}, self.refuse_two)

    def refuse_two(self: Any, a: int) -> None:
        if a == 2:
            raise ValueError("two")

    def cleanup_fails_too(self: Any) -> None:
        self.addCleanup(self.refuse_two, 2)
        raise KeyError("first")


class Ending:
    """Ways to end that are no failure."""

    __test__ = False

    @property
    def world_size(self) -> int:
        return 2

    def skips(self: Any) -> None:
        self.skipTest("not on two ranks")

    @unittest.expectedFailure
    def fails_as_expected(self: Any) -> None:
        assert self.rank == 2

    @skip_unless_torch_gpu
    def needs_gpus(self: Any) -> None:
        assert torch.cuda.device_count() >= NUM_DEVICES

    @with_comms(backend="nccl")
    def needs_nccl(self: Any) -> None:
        assert torch.cuda.device_count() >= 2


class EndingProcesses(Ending, DTensorTestBase):
    pass


class EndingSimulated(Ending, DTensorOpTestBase):
    pass


class FailingProcesses(Failing, DTensorTestBase):
    pass


class FailingSimulated(Failing, DTensorOpTestBase):
    pass


def result_of(case: type[DTensorTestBase] | type[DTensorOpTestBase], method: str) -> unittest.TestResult:
    result = unittest.TestResult()
    case(method).run(result)
    return result


def report(case: type[DTensorTestBase] | type[DTensorOpTestBase], method: str) -> str:
    """What unittest prints of a test that fails or has an error."""
    result = result_of(case, method)
    ((_, text),) = result.failures + result.errors
    return text


@pytest.mark.parametrize("case", [EndingProcesses, EndingSimulated])
def test_skips_and_expected_failures_of_all_ranks_are_those_of_the_test(case: Any) -> None:
    assert [why for _, why in result_of(case, "skips").skipped] == ["not on two ranks"]
    assert len(result_of(case, "fails_as_expected").expectedFailures) == 1


@pytest.mark.parametrize(
    ("case", "method", "gpus"),
    [
        (EndingProcesses, "needs_gpus", NUM_DEVICES),
        (EndingSimulated, "needs_gpus", NUM_DEVICES),
        (EndingProcesses, "needs_nccl", 2),
    ],
)
def test_what_needs_more_gpus_than_there_are_is_skipped_before_ranks_start(case: Any, method: str, gpus: int) -> None:
    result = result_of(case, method)
    reasons = [f"Need at least {gpus} CUDA devices"] if torch.cuda.device_count() < gpus else []
    assert [why for _, why in result.skipped] == reasons
    assert result.wasSuccessful()


@pytest.mark.parametrize("case", [FailingProcesses, FailingSimulated])
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("raises", ["KeyError: 'boom'", 'in raises\n    raise KeyError("boom")', "on rank 1 of 2, "]),
        ("exits", ["SystemExit: 3", "on rank 1 of 2, "]),
        ("skips_alone", ["Ranks 1 skipped this test (odd ranks do not), but ranks 0 ran it."]),
        ("subtest", ["ValueError: two", "in the subtest a=2"]),
        ("cleanup_fails_too", ["KeyError: 'first'", "the cleanup after it raised ValueError: two"]),
    ],
)
def test_a_failure_is_reported_with_where_and_why(case: Any, method: str, said: list[str]) -> None:
    text = report(case, method)
    assert all(part in text for part in said), text
    assert method != "raises" or "shardwise/testing" not in text.split("KeyError: 'boom'")[0]


class Hidden(DTensorTestBase):
    __test__ = False


def test_a_class_that_its_module_does_not_have_under_its_name_is_told_for_processes() -> None:
    class Local(Hidden):
        def test(self) -> None: ...

    assert "SendError" in report(Local, "test")
    assert "no module has this one under that name" in report(Local, "test")


def test_a_method_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no such test method"):
        FailingSimulated("nothing")
    assert FailingSimulated().rank == -1


# ---- assertEqual -------------------------------------------------------------------------------------------------


class TestEqual(TensorAssertions):
    def test_tensors_inside_containers_are_compared_with_tolerance(self) -> None:
        self.assertEqual({"a": [torch.tensor([1.0])]}, {"a": [torch.tensor([1.0 + 1e-7])]})
        with pytest.raises(AssertionError, match=r"not close(?s:.)*the total of all ranks"):
            self.assertEqual([torch.tensor([1.0])], [torch.tensor([1.1])], "the total of all ranks")
        self.assertEqual(torch.tensor([1.0]), torch.tensor([1.1]), atol=0.2, rtol=0)

    def test_numbers_and_lists_beside_tensors(self) -> None:
        self.assertEqual(torch.tensor([2, 3]), [2, 3])
        self.assertEqual(2.0, torch.tensor(2.0))
        with pytest.raises(AssertionError):
            self.assertEqual(torch.tensor([2, 3]), [2, 4])

    def test_dtypes_and_values_that_are_not_numbers(self) -> None:
        nan = torch.tensor([float("nan")])
        self.assertEqual(nan, nan.clone())
        with pytest.raises(AssertionError):
            self.assertEqual(nan, nan.clone(), equal_nan=False)
        with pytest.raises(AssertionError, match="dtype"):
            self.assertEqual(torch.ones(1), torch.ones(1, dtype=torch.float64))
        self.assertEqual(torch.ones(1), torch.ones(1, dtype=torch.float64), exact_dtype=False)

    def test_other_values_are_unittest_s_matter(self) -> None:
        self.assertEqual({"a": 1}, {"a": 1})
        with pytest.raises(AssertionError, match="First differing element 1"):
            self.assertEqual([1, 2], [1, 3])


class TestWhole(DTensorOpTestBase):
    def test_distributed_tensors_are_compared_whole(self) -> None:
        x: Tensor = torch.arange(7.0)
        d = distribute_tensor(x, self.build_device_mesh(), [Shard(0)])
        assert isinstance(d, DTensor)
        self.assertEqual(d, x)
        self.assertEqual([d], [d.redistribute(placements=[Replicate()])])
        with pytest.raises(AssertionError, match="index"):
            self.assertEqual(d, x + (x == 6))
