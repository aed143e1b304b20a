"""Test cases whose methods run on every rank, for unittest and pytest, with the names of torch's own kit."""

import functools
import inspect
import itertools
import pickle
import sys
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, overload

import torch

from shardwise._collectives import DeviceMesh, barrier, fingerprint, init_device_mesh, rank, world_size
from shardwise._layout import Mesh
from shardwise._rules.row import Args, Kwargs
from shardwise._trace.user_stack import StackFrame
from shardwise.errors import RemoteRankError, summary
from shardwise.testing.assertions import TensorAssertions
from shardwise.testing.converter import DTensorConverter
from shardwise.testing.failures import DeadlockError, point_at
from shardwise.testing.pool import renew_pool, run_on_processes
from shardwise.testing.reference import Reference, refer, why_not_picklable
from shardwise.testing.simulated import run_on_threads

__unittest = True  # unittest leaves the frames of such modules out of its reports

F = TypeVar("F", bound=Callable[..., Any])

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"
"""`"cuda"` if torch sees a GPU, else `"cpu"`."""
DEVICE_COUNT = torch.cuda.device_count()
"""The number of GPUs that torch sees."""
PG_BACKEND = "nccl" if DEVICE_TYPE == "cuda" else "gloo"
"""The backend of the process group of a test."""
NUM_DEVICES = min(4, DEVICE_COUNT) if DEVICE_COUNT > 1 else 4
"""The default number of ranks of a test: 4, or the number of GPUs."""

_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
_SEED = 1234


def skip_unless_torch_gpu(method: F) -> F:
    """Skip a test, or a class of tests, unless there are `NUM_DEVICES` GPUs."""
    return unittest.skipUnless(DEVICE_COUNT >= NUM_DEVICES, f"Need at least {NUM_DEVICES} CUDA devices")(method)


@dataclass(frozen=True)
class _TestRun:
    """A test as each rank runs it; pickled for real ranks."""

    test_class: Reference | type["RankedTestCase"]
    method: str
    attributes: bytes  # attributes from setUp, pickled
    unpicklable: Mapping[str, str]  # why others of them cannot be pickled, by name
    fingerprinted: bool  # ranks compare their collectives before they make them, as simulated ranks always do

    def on_this_rank(self) -> tuple[str | None, int]:
        """Run the test. Returns why it was skipped, or None, and the size of the world after it."""
        test_class = self.test_class.resolve() if isinstance(self.test_class, Reference) else self.test_class
        case: RankedTestCase = test_class(self.method)
        case.rank = rank()
        vars(case).update(pickle.loads(self.attributes), _unpicklable=self.unpicklable)  # noqa: S301 - our parent's
        torch.manual_seed(_SEED)
        skipped: str | None = None
        try:
            case.perThreadSetUp()
            with fingerprint() if self.fingerprinted else nullcontext():
                getattr(test_class, self.method)(case)
        except unittest.SkipTest as skip:
            skipped = str(skip)
        finally:
            failure = sys.exception()  # counts for more than what the cleanup raises after that
            cleanups: list[tuple[Callable[..., object], Args, Kwargs]] = vars(case)["_cleanups"]
            try:
                case.perThreadTearDown()
                while cleanups:
                    function, args, kwargs = cleanups.pop()
                    function(*args, **kwargs)
            except Exception as error:
                if failure is None:
                    raise
                failure.add_note(f"the cleanup after it raised {summary(error)}")
        return skipped, world_size()


def _skip_if_skipped(reasons: Sequence[str | None]) -> None:
    """Skip the test if all ranks skip it; raise if only some of them do."""
    skipped = [str(rank) for rank, reason in enumerate(reasons) if reason is not None]
    ran = [str(rank) for rank, reason in enumerate(reasons) if reason is None]
    if skipped and ran:
        raise AssertionError(
            f"Ranks {', '.join(skipped)} skipped this test ({reasons[int(skipped[0])]}), but "
            f"ranks {', '.join(ran)} ran it. Fix: skip on all ranks, or on none."
        )
    if skipped:
        raise unittest.SkipTest(reasons[0] or "")


class RankedTestCase(TensorAssertions):
    """A test case whose test methods run once on each rank of a world; see `DTensorTestBase`, `DTensorOpTestBase`.

    `setUp` and `tearDown` run once, in the calling process. Each rank works on its own instance with copies of the
    attributes that `setUp` made, and torch's generators start from one seed.

    Attributes:
        timeout: seconds a test may take; ranks that have not returned by then are reported as a deadlock.
        rank: of this instance; -1 in the calling process.
    """

    MAIN_PROCESS_RANK = -1
    timeout: float = 60.0
    _unpicklable: Mapping[str, str] = MappingProxyType({})

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        name = method_name if methodName == "runTest" else methodName
        super().__init__(name)
        self.rank = self.MAIN_PROCESS_RANK
        test = getattr(self, name, None)
        if test is not None:

            @functools.wraps(test)
            def start(self: RankedTestCase) -> None:
                __tracebackhide__ = True
                self._run_on_ranks(test)

            setattr(
                self, name, MethodType(start, self)
            )  # a bare function would be a static method to unittest's loader
        self._initial_attributes = frozenset({*vars(self), "_initial_attributes"})

    def _run_on_ranks(self, test: Callable[[], object]) -> None:
        raise NotImplementedError("Derive tests from DTensorTestBase or DTensorOpTestBase.")

    def _test_run(self, test_class: "Reference | type[RankedTestCase]") -> _TestRun:
        made = {name: value for name, value in vars(self).items() if name not in self._initial_attributes}
        unpicklable = {name: why for name, value in made.items() if (why := why_not_picklable(value)) is not None}
        pickled = pickle.dumps({name: value for name, value in made.items() if name not in unpicklable})
        return _TestRun(test_class, self._testMethodName, pickled, unpicklable, isinstance(test_class, Reference))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in self._unpicklable:
                raise AttributeError(
                    f"{name!r} was made where the test was started and cannot be sent to the ranks "
                    f"({self._unpicklable[name]}). Fix: make it in the test, or in perThreadSetUp()."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def perThreadSetUp(self) -> None:  # noqa: N802 - torch's name
        """Runs on each rank before the test."""

    def perThreadTearDown(self) -> None:  # noqa: N802 - torch's name
        """Runs on each rank after the test, also after one that failed."""

    @property
    def world_size(self) -> int:
        """The number of ranks of a test of this class."""
        return NUM_DEVICES

    @property
    def device_type(self) -> str:
        """The device of a test's tensors."""
        return DEVICE_TYPE

    def build_device_mesh(self) -> Any:
        """A mesh of all ranks, with one axis."""
        return init_device_mesh(self.device_type, (self.world_size,))

    def run_subtests(
        self, subtest_config: Mapping[str, Sequence[Any]], test_fn: Callable[..., object], *args: Any, **kwargs: Any
    ) -> None:
        """Call `test_fn(*args, **kwargs, name=value, …)` for every combination of values, ranks side by side.

        Args:
            subtest_config: the values to try, by the name of a keyword argument.
        """
        for values in itertools.product(*subtest_config.values()):
            chosen = dict(zip(subtest_config, values, strict=True))
            with self.subTest(**chosen):
                try:
                    test_fn(*args, **kwargs, **chosen)
                except Exception as error:
                    error.add_note(f"in the subtest {', '.join(f'{name}={value!r}' for name, value in chosen.items())}")
                    raise
            barrier(tuple(range(world_size())))

    def _test_op(
        self, mesh: Mesh | DeviceMesh, op_call: Callable[..., object], *args: object, **kwargs: object
    ) -> None:
        """Compare `op_call` of plain tensors with `op_call` of DTensors, in every combination of the converter."""
        expected = op_call(*args, **kwargs)
        converter = DTensorConverter(mesh, args, kwargs)
        for d_args, d_kwargs in converter:
            try:
                self.assertTrue(converter.successful())  # noqa: PT009 - for any runner
                self.assertEqual(op_call(*d_args, **d_kwargs), expected)  # noqa: PT009 - for tensors
            except Exception as error:
                error.add_note(f"with placements {', '.join(str(list(one)) for one in converter.placements)}")
                raise


class DTensorOpTestBase(RankedTestCase):
    """Tests on simulated ranks: threads of this process that take turns, ready in milliseconds.

    They are ranks of shardwise (`shardwise.rank`, meshes, DTensors); `torch.distributed` does not know them.
    """

    def _run_on_ranks(self, test: Callable[[], object]) -> None:
        __tracebackhide__ = True
        run = self._test_run(type(self))
        results = run_on_threads(self.world_size, self.timeout, run.on_this_rank, (), {})
        _skip_if_skipped([reason for reason, _ in results])


class DTensorTestBase(RankedTestCase):
    """Tests on real processes, which are started once for each size of the world and kept from test to test.

    A test class must be found by its name in its module. The processes are in a world of `torch.distributed` from the
    start; `init_pg` only checks this, and `destroy_pg` waits for all ranks.
    """

    @property
    def device_type(self) -> str:
        """ "cuda" where there is a GPU for each rank, else "cpu"."""
        return "cpu" if self.world_size > DEVICE_COUNT else DEVICE_TYPE

    @property
    def backend(self) -> str:
        """The transport of `torch.distributed`: "gloo" or "nccl"."""
        return "gloo" if self.device_type == "cpu" else PG_BACKEND

    def _run_on_ranks(self, test: Callable[[], object]) -> None:
        __tracebackhide__ = True
        backend = self._backend = self._checked(getattr(test, "_backend", None))
        size, name, args = self.world_size, self.id(), [self._test_run(refer(type(self)))]
        try:
            run = _TestRun.on_this_rank
            results = run_on_processes(size, self.timeout, run, args, {}, backend=backend, called=name)
        except (DeadlockError, RemoteRankError) as error:
            frames = ((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))
            if not any(StackFrame(code.co_filename, line, code.co_name).is_user_code for code, line in frames):
                code = inspect.unwrap(test).__code__  # a report without a line of the user's code shows the test
                point_at(error, StackFrame(code.co_filename, code.co_firstlineno, code.co_name), code.co_firstlineno)
            raise
        if any(left != size for _, left in results):  # the test has ended the world
            renew_pool(size, backend)
        _skip_if_skipped([reason for reason, _ in results])

    def _checked(self, backend: str | None) -> str:
        wanted = self.backend if backend is None else backend
        if wanted not in _BACKENDS:
            raise RuntimeError(f"Backend {wanted} not supported! Fix: use one of {', '.join(_BACKENDS)}.")
        if "nccl" in wanted and self.world_size > DEVICE_COUNT:
            raise unittest.SkipTest(f"Need at least {self.world_size} CUDA devices")
        return wanted

    def init_pg(self, eager_init: bool = False, backend: str | None = None) -> None:
        """Check that this rank is in the world of its test, and that its transport is `backend`, if given.

        Raises:
            RuntimeError: there is no such world.
        """
        if world_size() != self.world_size:
            raise RuntimeError("This test has left its world. Fix: do not end the process group in a test.")
        if self._checked(backend) != self._backend:
            raise RuntimeError(
                f"init_pg wants the backend {backend}, but the ranks of this test were started with {self._backend}. "
                "Fix: decorate the test with with_comms(backend=...), or override the property `backend`."
            )

    def destroy_pg(self, device_id: int | None = None) -> None:
        """Return when all ranks have called this; the processes stay for the next test."""
        barrier(tuple(range(world_size())))


@overload
def with_comms(eager_init: F) -> F: ...
@overload
def with_comms(eager_init: bool = ..., backend: str | None = ...) -> Callable[[F], F]: ...
def with_comms(eager_init: bool | F = False, backend: str | None = None) -> F | Callable[[F], F]:
    """Decorate a test method, with or without arguments: `init_pg` before it and `destroy_pg` after it.

    If the case has no `init_pg`, as on simulated ranks, the test runs unchanged.

    Args:
        eager_init: passed to `init_pg`.
        backend: of the processes that run the test; None: the case's.
    """
    if callable(eager_init):
        return with_comms()(eager_init)

    def decorate(test: F) -> F:
        @functools.wraps(test)
        def wrapper(self: DTensorTestBase, *args: object, **kwargs: object) -> None:
            __tracebackhide__ = True
            has_group = hasattr(self, "init_pg")
            if has_group:
                self.init_pg(eager_init, backend)
            test(self, *args, **kwargs)
            if has_group:
                self.destroy_pg()

        vars(wrapper)["_backend"] = backend
        return cast("F", wrapper)

    return decorate
