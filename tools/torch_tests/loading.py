"""Loads a test file of PyTorch so that its imports of torch's distributed tensors give shardwise."""

import ast
import re
import sys
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

HERE = "__here__"  # the name that rewritten code calls
_NAMES = ("tools.torch_tests.names",)
_TENSOR = ("shardwise", "shardwise._collectives", "shardwise._layout", "shardwise._trace.comm_trace", *_NAMES)
_SHARDED = (*_NAMES, "shardwise.sharded_tensor")
_PARALLEL = ("shardwise.parallel",)
_KIT = ("tools.torch_tests.bases", "shardwise.testing", "shardwise")
_BASES = "tools.torch_tests.bases"
_HELPERS = "torch.testing._internal.distributed._shard"

# Where the names of a module of torch are looked up, in this order. Names of other modules below these are not here.
SOURCES: dict[str, tuple[str, ...]] = {
    "torch.distributed.tensor": _TENSOR,
    "torch.distributed.tensor.placement_types": _TENSOR,
    "torch.distributed.tensor.parallel": _PARALLEL,
    "torch.distributed.tensor.parallel.api": _PARALLEL,
    "torch.distributed.tensor.parallel.style": _PARALLEL,
    "torch.distributed.tensor.parallel.loss": _PARALLEL,
    "torch.distributed.tensor.parallel.input_reshard": _PARALLEL,
    "torch.distributed.tensor.debug": ("tools.torch_tests.counts", "shardwise.debug"),
    "torch.distributed.tensor.experimental": ("shardwise.experimental",),
    "torch.distributed.tensor._ops.utils": _NAMES,
    "torch.distributed._tensor": _TENSOR,
    "torch.distributed._tensor._utils": _NAMES,
    "torch.distributed._tensor.api": _TENSOR,
    "torch.distributed._tensor.placement_types": _TENSOR,
    "torch.distributed._tensor.experimental": ("shardwise.experimental",),
    "torch.distributed.device_mesh": ("shardwise", "torch.distributed.device_mesh"),
    "torch.distributed.remote_device": _SHARDED,
    "torch.distributed._shard": _SHARDED,
    "torch.distributed._shard.api": _SHARDED,
    "torch.distributed._shard.metadata": _SHARDED,
    "torch.distributed._shard.sharder": _SHARDED,
    "torch.distributed._shard.sharding_plan": _SHARDED,
    "torch.distributed._shard.sharding_plan.api": _SHARDED,
    "torch.distributed._shard.sharding_spec": _SHARDED,
    "torch.distributed._shard.sharding_spec.api": _SHARDED,
    "torch.distributed._shard.sharding_spec._internals": _NAMES,
    "torch.distributed._shard.sharded_tensor": _SHARDED,
    "torch.distributed._shard.sharded_tensor.api": _SHARDED,
    "torch.distributed._shard.sharded_tensor.metadata": _SHARDED,
    "torch.distributed._shard.sharded_optim": _SHARDED,
    "torch.testing._internal.distributed._tensor.common_dtensor": _KIT,
    f"{_HELPERS}.sharded_tensor": _KIT,
    **{
        name: ("tools.torch_tests.bases", name)
        for name in (
            "torch.testing._internal.common_cuda",
            "torch.testing._internal.common_distributed",
            "torch.testing._internal.common_utils",
        )
    },
}
# Helpers of torch's tests, which are loaded like the tests themselves.
_LOADED = {
    f"{_HELPERS}.{name}": f"testing/_internal/distributed/_shard/{name.replace('.', '/')}.py"
    for name in ("test_common", "sharded_tensor._test_st_common", "sharded_tensor._test_ops_common")
}
_TAKEN = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
# Tests that need GPUs run on the CPU, with as many lines as before.
_ON_CPU = [
    (r"""\.cuda\((?:[^()]|\([^()]*\))*\)""", lambda found: ".cpu(" + "\n" * found[0].count("\n") + ")"),
    (r"""(?<=["'/])cuda:(?:\d|\{[^{}]*\})(?=["'])""", lambda found: "cpu"),
    (r"""(?<=["'])(?:cuda|nccl)(?=["'])""", lambda found: "cpu" if found[0] == "cuda" else "gloo"),
    (r"""torch\.cuda\.current_device\(\)""", lambda found: '"cpu"'),
    (r"""torch\.device\(\d\)""", lambda found: 'torch.device("cpu")'),
]


class NotHereError(Exception):
    """A test uses a name of torch that shardwise does not have."""


class Missing:
    """A name that is not here: may be imported and decorate at import, and raises when a test uses it."""

    testing = False

    def __init__(self, name: str) -> None:
        self.name = name

    def used(self) -> "Missing":
        if Missing.testing:
            raise NotHereError(f"not here: {self.name}")
        return self

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.used()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.name}.{name}").used()

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)

    def __instancecheck__(self, value: object) -> bool:
        self.used()
        return False


class StandIn(ModuleType):
    """A module of torch whose names are those of shardwise; with `torchs`, its own, but for the bases of tests."""

    def __init__(self, name: str, torchs: bool) -> None:
        super().__init__(name)
        sources = SOURCES.get(name, ())
        vars(self)["_torchs"] = torchs
        vars(self)["_sources"] = (*(s for s in sources if s == _BASES), name) if torchs else sources

    def __getattr__(self, name: str) -> Any:
        below = f"{self.__name__}.{name}"
        if below in SOURCES or below in _LOADED:
            return here(below, self._torchs)
        for source in self._sources:
            module = import_module(source)
            if hasattr(module, name) and (source != _NAMES[0] or name in module.__all__):
                return getattr(module, name)
        if self._torchs:
            with suppress(ImportError):
                return import_module(below)
        return Missing(below)


def here(name: str, torchs: bool) -> Any:
    """What the module `name` of torch means in a test."""
    if name in _LOADED:
        return load(Path(torch.__file__).parent / _LOADED[name], name, torchs=torchs)
    return StandIn(name, torchs)


def _is_taken(name: str) -> bool:
    return name in SOURCES or name in _LOADED or any(name == each or name.startswith(f"{each}.") for each in _TAKEN)


class _Rewriter(ast.NodeTransformer):
    """Imports of torch's modules, their dotted names in code, `x._local_tensor` and `x._spec`."""

    def __init__(self, torchs: bool) -> None:
        self.torchs = torchs

    def visit_Import(self, node: ast.Import) -> ast.AST | list[ast.stmt]:
        kept = [alias for alias in node.names if not (alias.asname and _is_taken(alias.name))]
        made = [_assign(alias.asname or "", _call(alias.name)) for alias in node.names if alias not in kept]
        imported: list[ast.stmt] = [ast.Import(kept)] if kept else []
        return [ast.copy_location(each, node) for each in imported + made]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        if node.level or node.module is None:
            return node
        taken = [alias for alias in node.names if _is_taken(node.module) or _is_taken(f"{node.module}.{alias.name}")]
        kept = [alias for alias in node.names if alias not in taken]
        found: list[ast.stmt] = [ast.ImportFrom(node.module, kept, 0)] if kept else []
        for alias in taken:
            value = ast.Attribute(_call(node.module), alias.name, ast.Load())
            found.append(_assign(alias.asname or alias.name, value))
        return [ast.copy_location(each, node) for each in found]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "_local_tensor" and isinstance(node.ctx, ast.Load) and not self.torchs:
            local = ast.Attribute(self.visit(node.value), "to_local", ast.Load())
            return ast.copy_location(ast.Call(local, [], []), node)
        if node.attr == "_spec" and isinstance(node.ctx, ast.Load) and not self.torchs:
            spec_of = ast.Attribute(_call("torch.distributed._tensor._utils"), "spec_of", ast.Load())
            return ast.copy_location(ast.Call(spec_of, [self.visit(node.value)], []), node)
        if _dotted(node) in SOURCES:
            return ast.copy_location(_call(_dotted(node)), node)
        return self.generic_visit(node)


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
    return ""


def _call(name: str) -> ast.expr:
    return ast.Call(ast.Name(HERE, ast.Load()), [ast.Constant(name)], [])


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def load(file: Path, name: str, *, on_cpu: bool = True, torchs: bool = False) -> ModuleType:
    """The module of a test file, loaded once in a process."""
    name = f"{name}_of_torch" if torchs else name
    if name in sys.modules and HERE in vars(sys.modules[name]):
        return sys.modules[name]
    text = file.read_text(encoding="utf-8")
    if on_cpu:
        for pattern, replacement in _ON_CPU:
            text = re.sub(pattern, replacement, text)
    tree = ast.fix_missing_locations(_Rewriter(torchs).visit(ast.parse(text, str(file))))
    module = ModuleType(name)
    module.__file__ = str(file)
    vars(module)[HERE] = partial(here, torchs=torchs)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(file), "exec"), vars(module))  # noqa: S102 - it is what tests are for
    except BaseException:
        del sys.modules[name]
        raise
    return module
