"""Test cases with the names of torch's, whose methods run on ranks that are there: the base classes start nothing."""

import itertools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch.testing._internal import common_utils

from shardwise import init_device_mesh, rank
from shardwise.testing import DTensorConverter
from tools.torch_tests.counts import Count, different

F = TypeVar("F", bound=Callable[..., Any])

TEST_GPU_NUM = 4
TEST_MULTIGPU = True  # placements that name GPUs can be described without them
TEST_SKIPS: dict[str, Any] = {}


def _as_it_is(*args: Any, **options: object) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return args[0] if args and callable(args[0]) else lambda test: test


with_comms = skip_unless_torch_gpu = skip_if_lt_x_gpu = requires_nccl = requires_gloo = _as_it_is


class _Raises:
    """`assertRaisesRegex`: another text is noted."""

    def __init__(self, context: Any, pattern: str) -> None:
        self.context, self.pattern = context, pattern

    def __enter__(self) -> Any:
        return self.context.__enter__()

    def __exit__(self, *error: object) -> Any:
        caught = self.context.__exit__(*error)
        if not re.search(self.pattern, str(error[1])):
            different.append("error texts")
        return caught


_TestCase: Any = common_utils.TestCase  # torch leaves it without types


class TestCase(_TestCase):  # type: ignore[misc]
    """A test of one process."""

    def assertRaisesRegex(self, expected: Any, pattern: Any, *call: Any, **options: Any) -> Any:  # noqa: N802
        """The type is compared; another text is noted."""
        if not call:
            return _Raises(self.assertRaises(expected), pattern)  # noqa: PT027
        with _Raises(self.assertRaises(expected), pattern):  # noqa: PT027
            call[0](*call[1:], **options)
        return None


class OnRanks(TestCase):
    """A test that every rank of the world runs."""

    @property
    def world_size(self) -> int:
        return 4

    @property
    def rank(self) -> int:
        return rank()

    @property
    def device_type(self) -> str:
        return "cpu"

    @property
    def backend(self) -> str:
        return "gloo"

    @property
    def file_name(self) -> str:
        return tempfile.mkstemp()[1]

    def build_device_mesh(self) -> Any:
        return init_device_mesh("cpu", (self.world_size,))

    def assertEqual(self, x: Any, y: Any, *args: Any, **options: Any) -> None:  # noqa: N802
        """As in torch; a count of collectives is equal to any number."""
        if isinstance(x, Count) or isinstance(y, Count):
            _ = x == y
            return
        super().assertEqual(x, y, *args, **options)  # noqa: PT009 - what it is built on

    def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:  # noqa: N802
        """On every rank: more than torch compares."""
        self.assertEqual(x, y, msg)  # noqa: PT009

    def run_subtests(
        self, config: Mapping[str, Sequence[Any]], test: Callable[..., object], *args: object, **options: object
    ) -> None:
        for values in itertools.product(*config.values()):
            test(*args, **options, **dict(zip(config, values, strict=True)))

    def _test_op(self, mesh: Any, op_call: Callable[..., Any], *args: object, **options: object) -> None:
        expected = op_call(*args, **options)
        converter = DTensorConverter(mesh, args, options)
        for d_args, d_options in converter:
            self.assertTrue(converter.successful())  # noqa: PT009
            self.assertEqual(op_call(*d_args, **d_options).full_tensor(), expected)  # noqa: PT009

    def assert_sharded_tensor_equal(self, first: Any, second: Any) -> None:
        assert len(first.local_shards()) == len(second.local_shards())
        for mine, other in zip(first.local_shards(), second.local_shards(), strict=True):
            self.assertEqual(mine.tensor, other.tensor)  # noqa: PT009
            self.assertEqual(mine.metadata, other.metadata)  # noqa: PT009
        self.assertEqual(first.metadata(), second.metadata())  # noqa: PT009
        self.assertEqual(first.sharding_spec(), second.sharding_spec())  # noqa: PT009

    def _nothing(self, *args: object, **options: object) -> None:
        """The ranks and their process group are there before the test, and stay after it."""

    init_pg = destroy_pg = init_comms = destroy_comms = init_rpc = _spawn_processes = _spawn_threads = _nothing


DTensorTestBase = DTensorOpTestBase = ShardedTensorTestBase = MultiProcessTestCase = MultiThreadedTestCase = OnRanks


def spawn_threads_and_init_comms(test: Any = None, timeout: object = None, world_size: int = 4) -> Any:
    """Decorates a test of a plain test case that ranks run."""
    if test is None:
        return partial(spawn_threads_and_init_comms, world_size=world_size)
    test.world_size = world_size
    return test
