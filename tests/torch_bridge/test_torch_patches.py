"""shardwise changes in torch what the list of patches says, from the first DTensor on, and nothing else."""

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardwise import Mesh, Shard, distribute_tensor
from shardwise._torch_bridge import torch_patches
from shardwise.errors import RuleError
from tests.timeouts import PATIENCE_SECONDS
from tools.torch_patches_page import PAGE, page

# Every attribute of torch's modules and classes, and the elements of lists and dicts among them.
SNAPSHOT = """
import sys, types, warnings
warnings.simplefilter("ignore")  # attributes that are deprecated say so when they are read
def contents(value):
    if type(value) is dict or type(value).__name__ == "OrderedDict":
        return [*value, *value.values()]
    return list(value) if type(value) in (list, set) else [value.__code__] if type(value) is types.FunctionType else []
def snapshot():
    found, classes = {}, set()
    for module in [m for name, m in sys.modules.items() if name == "torch" or name.startswith("torch.")]:
        if type(module) is not types.ModuleType:  # torch.ops and torch.classes: loaded name by name
            continue
        for name, value in vars(module).items():
            if not issubclass(type(value), types.ModuleType):
                found[f"{module.__name__}.{name}"] = value, contents(value)
            if issubclass(type(value), type) and value.__module__.partition(".")[0] == "torch" and value not in classes:
                classes.add(value)
                name = value.__qualname__.removeprefix(value.__module__ + ".")
                for key, member in vars(value).items():
                    found[f"{value.__module__}.{name}.{key}"] = member, contents(member)
    return found
def difference(a, b):
    def same(x, y):
        return x[0] is y[0] and len(x[1]) == len(y[1]) and all(p is q for p, q in zip(x[1], y[1]))
    names = {*a, *b} - {
        "torch.jit._builtins._builtin_table",  # a cache of every name of torch.ops.aten that was read
        "torch.utils.hooks.RemovableHandle.next_id",  # counts hooks of all kinds
    }
    # Where libraries register their containers: keyed tensors, and the dataclasses of captured functions.
    names -= {f"torch.utils._pytree.SUPPORTED_{kind}" for kind in ("NODES", "SERIALIZED_TYPES")}
    names -= {"torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE", "torch.export.dynamic_shapes.SUPPORTED_NODES"}
    return sorted(name for name in names if name not in a or name not in b or not same(a[name], b[name]))
"""
SCENARIO = """
import torch
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
def step(convert):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    for layer in model:
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, torch.nn.Parameter(convert(p.detach())))
    for make in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = make(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            Double.apply(model(convert(torch.ones(2, 4)))).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
"""


def run_python(code: str, *args: str) -> Any:
    """What `code` prints last, from JSON, in a process of its own."""
    command = [sys.executable, "-c", SNAPSHOT + SCENARIO + code, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORTS = """
import shardwise, shardwise.checkpoint
for name in shardwise.__all__:
    getattr(shardwise, name)
"""
DISTRIBUTED = """
from shardwise import Mesh, Shard, distribute_tensor
step(lambda x: distribute_tensor(x, Mesh((1,)), [Shard(0)]))
"""


@pytest.mark.processes
def test_only_the_listed_attributes_of_torch_change_and_only_with_the_first_dtensor(tmp_path: Path) -> None:
    loaded = "import json\nprint(json.dumps([m for m in sys.modules if m[:6] == 'torch.']))"
    modules = run_python(IMPORTS + DISTRIBUTED + loaded)
    names = tmp_path / "modules.json"
    later = [p.module for p in torch_patches.PATCHES if p.module]
    names.write_text(json.dumps([*modules, *later]), encoding="utf-8")
    code = f"""
import importlib, json, pathlib
for name in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    try:
        importlib.import_module(name)
    except ImportError:  # an attribute that acts as a module
        pass
step(lambda x: x)
before = snapshot()
{IMPORTS}
imported = snapshot()
{DISTRIBUTED}
used = snapshot()
shardwise._torch_bridge.torch_patches.uninstall()
print(json.dumps([difference(before, imported), difference(before, used), difference(before, snapshot())]))
"""
    imported, used, undone = run_python(code, str(names))
    hooks = ["torch.optim.optimizer._global_optimizer_pre_hooks"]
    assert imported == [], imported
    assert used == sorted([*(target for p in torch_patches.PATCHES for target in p.targets), *hooks])
    assert undone == []


@pytest.mark.processes
def test_modules_that_are_imported_after_the_first_dtensor_are_patched_then() -> None:
    modules = sorted({p.module for p in torch_patches.PATCHES if p.module})
    targets = [target.rpartition(".")[0::2] for p in torch_patches.PATCHES if p.module for target in p.targets]
    code = f"""
import importlib, inspect, json, pkgutil, shardwise
finders = list(sys.meta_path)
shardwise.distribute_tensor(torch.ones(2), shardwise.Mesh((1,)), [shardwise.Shard(0)])
assert not {set(modules)} & {{*sys.modules}}
for module in {modules}:
    assert inspect.getsource(importlib.import_module(module))
replaced = [getattr(pkgutil.resolve_name(owner), name) for owner, name in {targets}]
shardwise._torch_bridge.torch_patches.uninstall()
originals = [getattr(pkgutil.resolve_name(owner), name) for owner, name in {targets}]
print(json.dumps([[f.__code__.co_name for f in replaced], [f.__name__ for f in originals],
    [f.__code__.co_name for f in originals], finders == sys.meta_path]))
"""
    replaced, names, originals, undone = run_python(code)
    assert set(replaced) == {"check_first", "iterate", "offload"}
    assert originals == names == [name for _, name in targets]
    assert undone


def test_the_page_lists_the_patches() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.processes
@pytest.mark.parametrize("first", ["torch", "shardwise"])
def test_compiled_and_scripted_code_and_default_devices_do_not_notice(first: str, tmp_path: Path) -> None:
    (tmp_path / "scripted.py").write_text(
        "import torch\ndef run(x: torch.Tensor):\n    return x + torch.full([3], 2.0)\n"
    )
    patch = "shardwise.distribute_tensor(torch.ones(2), placements=[shardwise.Replicate()])\n"
    steps = """
def step(x):
    a = torch.tensor([1., 2., 3.]) + torch.full((3,), 2.0) + torch.as_tensor([1., 1., 1.]) + torch.arange(3)
    return x * (a + x.new_full((3,), 3.0) + x.new_tensor([1., 2., 3.]) + torch.asarray([1., 2., 3.])) + x.data
def check():
    x = torch.ones(3)
    assert torch.compile(step, backend="eager", fullgraph=True)(x).equal(step(x))
    assert torch.jit.script(scripted.run)(x).tolist() == [3.0] * 3
    with torch.device("meta"):
        assert torch.tensor(1.0).is_meta and torch.full((2,), 1.0).is_meta and torch.arange(3).is_meta
    assert pickle.loads(pickle.dumps(torch.tensor)) is torch.tensor
"""
    code = f"import json, pickle, shardwise, torch\nsys.path.append({str(tmp_path)!r})\nimport scripted\n{steps}"
    code += patch + "check()\n" if first == "shardwise" else "check()\n" + patch + "check()\n"
    assert run_python(code + "print(json.dumps(torch.tensor.__name__))") == "tensor"


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    torch_patches.uninstall()
    return monkeypatch


def test_a_torch_without_an_attribute_to_replace_is_refused_in_one_sentence_and_left_alone(
    uninstalled: pytest.MonkeyPatch,
) -> None:
    gone = replace(torch_patches.PATCHES[0], names="autograd.Function.gone")
    uninstalled.setattr(torch_patches, "PATCHES", (*torch_patches.PATCHES, gone))
    apply = vars(torch.autograd.Function)["apply"]
    with pytest.raises(RuleError, match=re.escape(torch.__version__)) as error:
        distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)])
    assert str(error.value) == (
        f"torch {torch.__version__} has no torch.autograd.Function.gone, which shardwise has to replace, because "
        f"without it {gone.without}. Fix: install torch 2.13 or 2.14."
    )
    assert vars(torch.autograd.Function)["apply"] is apply


def test_an_import_of_the_users_goes_on_where_its_module_has_no_attribute_to_replace(
    uninstalled: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "imported_later.py").write_text("there = 1\n")
    uninstalled.setattr(torch, "__path__", [*torch.__path__, str(tmp_path)])
    gone = replace(torch_patches.PATCHES[0], names="imported_later.gone", module="torch.imported_later")
    uninstalled.setattr(torch_patches, "PATCHES", (*torch_patches.PATCHES, gone))
    distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)])
    with pytest.warns(UserWarning, match="has no torch.imported_later.gone, which shardwise has to replace"):
        assert import_module("torch.imported_later").there == 1


def test_a_torch_that_lost_what_no_error_would_show_is_refused(uninstalled: pytest.MonkeyPatch) -> None:
    uninstalled.setattr(torch._C, "_dispatch_tls_is_dispatch_key_excluded", lambda *_: False)
    with pytest.raises(RuleError, match=r"has lost excluded dispatch keys.*Fix: install torch 2\.13 or 2\.14"):
        distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)])


def test_the_next_dtensor_installs_again_and_inherited_attributes_are_inherited_again(
    uninstalled: pytest.MonkeyPatch,
) -> None:
    inherited = replace(torch_patches.PATCHES[0], names="nn.Linear.train", replacement=lambda original: original)
    uninstalled.setattr(torch_patches, "PATCHES", (*torch_patches.PATCHES, inherited))
    for _ in range(2):
        distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)])
        assert "train" in vars(nn.Linear)
        torch_patches.uninstall()
        assert "train" not in vars(nn.Linear)


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        *((v, True) for v in ("2.15.0", "2.15.0a0+git", "2.1.3", "2.130.0", "3.0.0.dev20270101+cpu")),
        *((v, False) for v in ("2.13.0+cpu", "2.14.1+cu130", "2.14.0a0+gitabc", torch.__version__)),
    ],
)
def test_only_an_untested_torch_warns_once_in_one_sentence(
    uninstalled: pytest.MonkeyPatch, version: str, warns: bool
) -> None:
    uninstalled.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            assert distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)]).sum().item() == 2
    said = f"shardwise is tested with torch 2.13 and 2.14, not with torch {version}."
    assert [(w.category, str(w.message)) for w in warned] == [(UserWarning, said)] * warns


def test_an_attribute_error_of_a_step_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)]))
    p.grad = distribute_tensor(torch.ones(2), Mesh((1,)), [Shard(0)])
    monkeypatch.delattr(optim.SGD, "_init_group")
    with pytest.raises(AttributeError, match="_init_group"):
        optim.SGD([p]).step()
