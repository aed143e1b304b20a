"""Actions that run right after a module is imported, by whoever imports it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds the modules that actions wait for as the other finders do."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                for action in self.actions.pop(name, ()):
                    action()

            vars(spec.loader)["exec_module"] = execute_and_act
        return spec


_finder = _Finder()


def after_import(module: str, action: Callable[[], None]) -> None:
    """Run `action` after the next import of `module`; at once if it is imported already."""
    if module in sys.modules:
        action()
        return
    _finder.actions.setdefault(module, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget_imports() -> None:
    """Forget all actions that did not run."""
    _finder.actions.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
