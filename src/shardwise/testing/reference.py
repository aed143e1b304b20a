"""References to functions by name, for processes that can import their module."""

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise._launch.processes import has_main_file
from shardwise.errors import summary
from shardwise.testing.failures import SendError

_MAX_WRAPPERS = 50


@dataclass(frozen=True)
class Reference:
    """Reference to a function: module, name in it, and how many decorators are around it."""

    module: str
    file: str | None
    name: str
    wrappers: int

    def resolve(self) -> Callable[..., Any]:
        """The function, in this process."""
        found = _lookup(_load(self.module, self.file), self.name)
        for _ in range(self.wrappers):
            found = _inside(found)
        assert callable(found), self
        return found


def refer(fn: Callable[..., Any]) -> Reference:
    """The reference to `fn`."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module == "__main__" and not has_main_file():
        raise SendError(
            f"{name} cannot run on real ranks: it was defined interactively, and new processes import from "
            "files. Fix: define it in a module file and import it (in a notebook: %%writefile jobs.py in its own "
            "cell, then import jobs); or use simulated ranks, without real=True."
        )
    loaded = sys.modules.get(module or "")
    if loaded is not None and name is not None and "<" not in name:
        found = _lookup(loaded, name)
        for wrappers in range(_MAX_WRAPPERS):
            if found is fn:
                return Reference(loaded.__name__, getattr(loaded, "__file__", None), name, wrappers)
            found = _inside(found)
    raise SendError(
        f"{name or fn!r} of module {module} cannot run on real ranks: functions are sent there by name, and "
        f"{'this one has none' if name is None else 'no module has this one under that name'}. "
        "Fix: define it with `def` at module level and pass what it needs as arguments."
    )


def why_not_picklable(value: object) -> str | None:
    """The error of pickling `value`; None if there is none."""
    try:
        pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - whatever a pickle may raise
        return summary(error)
    return None


def _lookup(module: ModuleType, name: str) -> object:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _inside(decorated: object) -> object:
    """The function inside a decorator; Hypothesis stores it elsewhere."""
    given = getattr(decorated, "hypothesis", None)
    return getattr(decorated, "__wrapped__", None) or getattr(given, "inner_test", None)


def _load(name: str, file: str | None) -> ModuleType:
    """Import `name`; if that is another file or not on the path, as pytest allows, import `file` under this name."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        if file is None:
            raise
    else:
        found = getattr(module, "__file__", None)
        if file is None or (found is not None and Path(found).resolve() == Path(file).resolve()):
            return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"{file} is not a Python file"
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
