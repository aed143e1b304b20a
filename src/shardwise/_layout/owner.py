"""Owners of layout objects: every rank of every world has its own objects, equal to those of others."""

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakSet, WeakValueDictionary, ref


class LayoutKey:
    """One layout object in the key of a cache; unlike the layout, it is equal to no other object."""

    __slots__ = ("owner", "value")

    def __init__(self, value: object, owner: "Owner | None" = None) -> None:
        self.owner = owner
        self.value = ref(value)


class _Layout(Protocol):
    __slots__: Sequence[str]
    owner: "Owner | None"

    @property
    def unowned(self) -> Self: ...


L = TypeVar("L", bound=_Layout)
S = TypeVar("S")


class SizedCache(dict[object, Any]):
    """A cache of about this many bytes, which is cleared when it is full."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0

    def add(self, key: object, value: object, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self.limit:
            self.clear()
        self[key] = value
        self.num_bytes += num_bytes

    def clear(self) -> None:
        super().clear()
        self.num_bytes = 0


class Owner:
    """A rank of one world. A cache whose keys have layout objects distinguishes its tensors from those of others.

    Attributes:
        world: one object for all ranks of the world in this process.
        costs: of collectives, by type of device, by which this rank plans.
        calls: how this rank runs calls, by `call_key`.
        redistributions: how it redistributes, and the target layouts, by the arguments; one may take 9 MB at 4,096
            ranks.
    """

    def __init__(self, rank: int, world_size: int, world: object = None) -> None:
        _owners.add(self)
        self.world = self if world is None else world
        self.rank = rank
        self.world_size = world_size
        self.costs: dict[str, Any] = {}
        self.calls: dict[object, Any] = {}
        self.redistributions = SizedCache(1 << 26)
        self._states: dict[object, Any] = {}
        self._layouts: WeakValueDictionary[object, Any] = WeakValueDictionary()

    def described(self, other: "Owner") -> str:
        """This rank, for an error on another rank."""
        if self.world is other.world:
            return f"rank {self.rank} of this world"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"rank {self.rank} of another world, of {ranks}"

    def state(self, make: Callable[[], S]) -> S:
        """The rank's state of one kind, such as counts that ranks compare: `make()`, once in each world."""
        found: S | None = self._states.get(make)
        if found is None:
            found = self._states[make] = make()
        return found

    def forget(self) -> None:
        """End with the world: forget states, and how calls run, which has layouts."""
        self._states.clear()
        self.forget_calls()

    def forget_calls(self) -> None:
        """Forget how calls run."""
        self.calls.clear()
        self.redistributions.clear()

    def layout(self, layout: L) -> L:
        """The layout that is equal to `layout` and has this owner."""
        if layout.owner is self:
            return layout
        found: L | None = self._layouts.get(layout)
        if found is None:
            value = layout.unowned
            found = object.__new__(type(value))
            own = {"_value": value, "owner": self, "key": LayoutKey(value, self)}
            for name in type(value).__slots__:
                if name != "__weakref__":
                    object.__setattr__(found, name, own[name] if name in own else getattr(value, name))
            self._layouts[value] = found
        return found


CACHE_LIMIT = 1 << 16


def remember(cache: dict[Any, Any], key: object, value: object) -> None:
    """Add to a cache, which is cleared when it is full."""
    if len(cache) >= CACHE_LIMIT:
        cache.clear()
    cache[key] = value


# ---- what is completed before the first tensor has an owner -----------------------------------------------------

before_first: list[Callable[[], None]] = []
_completing = RLock()  # simulated ranks are threads


def before_first_dtensor(action: Callable[[], None]) -> None:
    """Call `action` once, before the next DTensor is made. `shardwise/__init__.py` completes the class by it."""
    if action not in before_first:
        before_first.append(action)


def complete() -> None:
    """Call the actions in `before_first`; an action may add others."""
    with _completing:
        while before_first:
            action = before_first[-1]
            action()
            before_first.remove(action)


_owners: WeakSet[Owner] = WeakSet()


def forget_calls() -> None:
    """Make all owners forget how calls run."""
    for owner in _owners:
        owner.forget_calls()
