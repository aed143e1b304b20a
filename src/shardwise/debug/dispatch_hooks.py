"""Tools that stand before the doors of the tensor and see every op go in and come out.

They are put in front only while one of them is used, so that an op pays nothing otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from shardwise import collectives
from shardwise.rules import RULES
from shardwise.tensor import DTensor
from shardwise.tensor.dispatch import entry
from shardwise.tensor.handlers.attributes import SAME

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Proceed = Callable[[], Any]
Watcher = Callable[[Proceed, Any, Args, Kwargs], Any]  # calls what it is given to let the op run, returns its result

# Those of each rank; simulated ranks are told apart by their transport.
_watchers: "WeakKeyDictionary[Any, list[Watcher]]" = WeakKeyDictionary()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Let `watcher` see every function that this rank calls with a DTensor, and what aten ops that is taken apart into.

    Several watchers nest: the one that came last is asked first.
    """
    here = collectives.transport()
    mine = _watchers.setdefault(here, [])
    mine.append(watcher)
    DTensor._enter = staticmethod(_enter)
    try:
        yield
    finally:
        mine[:] = [other for other in mine if other is not watcher]
        if not any(_watchers.values()):
            DTensor._enter = staticmethod(entry.enter)


def _enter(func: Any, args: Args, kwargs: Kwargs) -> Any:
    proceed: Proceed = lambda: entry.enter(func, args, kwargs)  # noqa: E731
    for watcher in _watchers.get(collectives.transport(), ()):
        proceed = _asked(watcher, proceed, func, args, kwargs)
    return proceed()


def _asked(watcher: Watcher, proceed: Proceed, func: Any, args: Args, kwargs: Kwargs) -> Proceed:
    return lambda: watcher(proceed, func, args, kwargs)


def is_op(func: Any) -> bool:
    """Whether a function computes something; not if it reads an attribute, sets a flag or runs backward."""
    if func in RULES:
        return True
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__") or name in SAME:
        return False
    return func not in DTensor._specials or "max" in name or "min" in name
