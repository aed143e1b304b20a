"""All changes of torch by shardwise: one table of functions that ask no subclass, and their replacements.

`install` runs before the first DTensor of the process is made, not on import; `uninstall` undoes it. The page
docs/reference/torch-patches.md is made from the table.
"""

import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._device import _device_constructors

from shardwise._layout.owner import before_first_dtensor
from shardwise._tensor.dispatch.hooks import hook_calls
from shardwise._tensor.dispatch.without_memory import without_modes
from shardwise._tensor.dtensor import DTensor
from shardwise._torch_bridge.bypasses import (
    asking,
    data_of_alike,
    full_gradients,
    refuse_in_trace,
    refusing,
    refusing_hooks,
    taking_numbers,
)
from shardwise._torch_bridge.custom_functions import apply_with_dtensors, saving_layouts
from shardwise._torch_bridge.optimizers import gathering_once, step_on_locals
from shardwise._torch_bridge.replicas import check_fully_shard, checking, reduced_by
from shardwise._torch_bridge.state_dicts import keeping_layouts, sharding_states, staging_locals, with_dtensors
from shardwise._torch_bridge.total_norm import total_norm_in_one_exchange
from shardwise.errors import RuleError

TESTED = ("2.13", "2.14")
USES_LOCAL_SHARD = "it silently uses the local shard"


@dataclass(frozen=True)
class Patch:
    """Attributes of torch that are replaced, on all tested versions."""

    names: str  # in torch, separated by spaces
    what: str  # the replacement does
    replacement: Callable[[Any], Any]  # from the original, as it lies in its module or class, to what takes its place
    without: str = USES_LOCAL_SHARD
    module: str = ""  # that holds the targets, if only some programs import it: replaced when it is imported
    listed: str = ""  # how the page of patches names it, if the target depends on the version of torch

    @property
    def targets(self) -> list[str]:
        """The full names."""
        return [f"torch.{name}" for name in self.names.split()]

    def originals(self) -> list[tuple[Any, str, Any]]:
        """The module or class of each target, the attribute's name and its present value."""
        found = []
        for target in self.targets:
            owner_name, _, name = target.rpartition(".")
            try:
                owner = pkgutil.resolve_name(owner_name)
                found.append((owner, name, inspect.getattr_static(owner, name)))
            except (ImportError, AttributeError):
                raise RuleError(
                    f"torch {torch.__version__} has no {target}, which shardwise has to replace, because without it "
                    f"{self.without}. Fix: install torch {' or '.join(TESTED)}."
                ) from None
        return found


# Since torch 2.14 `Function` has an `apply` of its own; before, it calls that of its base, which may be bound already.
_BASE_APPLY, _OWN_APPLY = "autograd.function._SingleLevelFunction.apply", "autograd.function.Function.apply"

# No official hook does what they do: torch calls `__torch_function__` for ops only.
PATCHES = (
    Patch(
        _BASE_APPLY if isinstance(vars(torch.autograd.Function)["apply"], classmethod) else _OWN_APPLY,
        "Runs a custom Function on DTensors, in forward and backward, and full backward hooks of modules. Calls "
        "without a DTensor and without a tensor that needs a gradient go to the original. In torch 2.14 "
        "`Function.apply` is replaced.",
        apply_with_dtensors,
        "custom autograd Functions and module backward hooks get local gradients",
        listed=f"torch.{_BASE_APPLY}",
    ),
    Patch(
        "utils.checkpoint._CheckpointFrame.save_inputs",
        "Saves the layouts of the inputs too.",
        saving_layouts,
        # torch unpacks a saved subclass as a plain tensor if saved-tensor hooks are active.
        "a nested activation checkpoint recomputes local tensors as if they were global",
    ),
    Patch(
        "_functorch.vmap._add_batch_dim _functorch.vmap._remove_batch_dim "
        "_functorch.eager_transforms._wrap_tensor_for_grad _functorch.eager_transforms._unwrap_for_grad "
        "_functorch.eager_transforms._maybe_wrap_functional_tensor",
        "Refuses a DTensor in transforms of `torch.func`.",
        asking,
        # `torch.func` wraps the local tensor in another one, which is not a subclass.
        "the transform silently takes the local shard",
    ),
    Patch(
        "optim.optimizer._foreach_supported_types utils._foreach_utils._foreach_supported_types",
        "Adds `DTensor` to the lists, so that optimizers and clipping use foreach ops.",
        lambda types: [*types, DTensor],
        # torch has no function that adds a type; its own DTensor appends to the same lists.
        "a step dispatches the ops of each parameter separately",
    ),
    Patch(
        "nn.utils.clip_grad._get_total_norm",
        "Computes the norm of all DTensors of a mesh in one exchange.",
        total_norm_in_one_exchange,
        "clipping stacks a 0-d DTensor for each parameter, which takes twice the time",
    ),
    Patch(
        "optim._muon._zeropower_via_newtonschulz",
        "Gathers the matrix once, in bfloat16.",
        gathering_once,
        "a step of Muon sends 15 to 20 times as much",
    ),
    Patch(
        "nn.modules.module.Module._load_from_state_dict",
        "Converts between DTensors of torch and of shardwise. With `assign=True` it shards a plain tensor as the "
        "DTensor that it replaces.",
        keeping_layouts,
        # Hooks of modules are registered for one module at a time.
        "`load_state_dict(full, assign=True)` of a sharded module silently makes its parameters plain",
    ),
    Patch(
        "optim.optimizer.Optimizer._process_value_according_to_param_policy",
        "Shards a state as its parameter, if the shapes are equal.",
        sharding_states,
        # Hooks of optimizers do not see a state together with its parameter.
        "`optimizer.load_state_dict(full)` keeps full states on all ranks",
    ),
    Patch(
        "distributed._state_dict_utils._iterate_state_dict",
        "Gathers, copies and offloads DTensors.",
        with_dtensors,
        # The function tests for torch's own class.
        "`get_model_state_dict(full_state_dict=True)` returns DTensors",
        "torch.distributed._state_dict_utils",
    ),
    Patch(
        "distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
        "Copies the local tensor of a DTensor.",
        staging_locals,
        # The function copies storages by address.
        "`torch.distributed.checkpoint.async_save` refuses a DTensor",
        "torch.distributed.checkpoint._state_dict_stager",
    ),
    Patch(
        "distributed._broadcast_coalesced",
        "Refuses a DTensor whose shards differ between ranks of the group.",
        checking(lambda group, tensors, *_: (tensors, group)),
        # A C++ function that takes a list of tensors.
        "`DistributedDataParallel` of a sharded module overwrites the shards of all ranks by those of rank 0",
    ),
    Patch(
        "nn.parallel.distributed.DistributedDataParallel._build_params_for_reducer",
        "Refuses a parameter whose shards differ between ranks, also with `init_sync=False`.",
        checking(reduced_by),
        # The method passes a list of parameters to C++.
        "gradients of different shards are averaged",
    ),
    Patch(
        "distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.__init__",
        "Refuses a parameter whose shards differ between ranks.",
        checking(lambda group, params, modules, mesh_info, *_, **__: (params, mesh_info.mesh), check_fully_shard),
        "torch's `fully_shard` gathers chunks of different shards, or aborts",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    ),
    Patch("tensor as_tensor asarray Tensor.new_tensor", "Returns a DTensor for a DTensor.", asking),
    Patch(
        "full scalar_tensor arange range eye randperm randint full_like Tensor.new_full",
        "Takes the number that a 0-d DTensor holds.",
        taking_numbers,
    ),
    Patch(
        "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_compressed_tensor to_dlpack "
        "utils.dlpack.to_dlpack Tensor.set_ Tensor.new Tensor.__new__ cuda.jiterator._JittedFunction.__call__",
        "Refuses a DTensor.",
        asking,
    ),
    Patch(
        "jit.ScriptFunction.__call__ ScriptMethod.__call__ ScriptObject.setattr",
        "Refuses a DTensor in TorchScript.",
        partial(refusing, "TorchScript"),
    ),
    Patch("nested.nested_tensor", "Refuses DTensors in the list.", partial(refusing, "A nested tensor")),
    Patch(
        "jit.trace jit.trace_module fx.experimental.proxy_tensor._MakefxTracer.trace",
        "Refuses calls with DTensors in the function that is traced.",
        hook_calls(refuse_in_trace),
    ),
    Patch(
        "autograd.function._HookMixin._register_hook",
        "Refuses hooks of a node that was read as `grad_fn` of a DTensor, except hooks of torch.",
        refusing_hooks,
        # A node does not know that its tensor is a DTensor.
        "hooks of nodes silently get local gradients",
    ),
    Patch("Tensor.data", "Refuses a DTensor as the data of a plain tensor.", data_of_alike),
    Patch("autograd._make_grads", "Gathers a DTensor that is the gradient of a plain tensor.", full_gradients),
)

# ---- installing -------------------------------------------------------------------------------------------------

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Apply all patches. Runs before the first DTensor; a second call does nothing."""
    if _undo:
        return
    if not torch.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        tested = " and ".join(TESTED)
        warnings.warn(f"shardwise is tested with torch {tested}, not with torch {torch.__version__}.", stacklevel=2)
    _check_silent_names()
    _device_constructors()  # cached: torch's set of functions that take a default device keeps the originals
    later = {patch.module: patch for patch in PATCHES if patch.module and patch.module not in sys.modules}
    for patch, originals in [(patch, patch.originals()) for patch in PATCHES if patch.module not in later]:
        _apply(patch, originals)
    finder = _Finder(later)
    sys.meta_path.insert(0, finder)
    _undo.append(lambda: sys.meta_path.remove(finder))
    _undo.append(register_optimizer_step_pre_hook(step_on_locals).remove)


def _apply(patch: Patch, originals: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in originals:
        is_own = name in vars(owner)
        replaced = patch.replacement(value)
        setattr(owner, name, staticmethod(replaced) if name == "__new__" else replaced)
        _undo.append(partial(setattr, owner, name, value) if is_own else partial(delattr, owner, name))


class _Finder(MetaPathFinder):
    """Finds modules with patches as the other finders do, and applies the patches after their import."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self.patches = patches

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.patches:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_apply(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path and (patch := self.patches.pop(name, None)) is not None:
                    try:
                        _apply(patch, patch.originals())
                    except RuleError as error:  # the import is one of the user's code, which goes on
                        warnings.warn(str(error), stacklevel=2)

            vars(spec.loader)["exec_module"] = execute_and_apply
        return spec


class _Subclass(Tensor):
    """For `_check_silent_names`."""


def _check_silent_names() -> None:
    """Check behaviour of torch whose loss would cause no error."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    with without_modes(), torch._C._EnableTorchFunction():
        x = torch.empty(1)
        vars(x.untyped_storage())["_shardwise"] = True
        has_attribute = hasattr(x[:].untyped_storage(), "_shardwise")
        own = x.as_subclass(_Subclass)
        vars(own)["__torch_function__"] = lambda *_: None
        answer = torch.abs(own)
    works = {
        "attributes of a storage, which say what is a copy of a view": has_attribute,
        "__torch_function__ of one tensor, which refuses old views": answer is None,
        "excluded dispatch keys, which say that backward asks for a shape": excluded,
    }
    if lost := [what for what, is_there in works.items() if not is_there]:
        raise RuleError(
            f"torch {torch.__version__} has lost {'; '.join(lost)}. Without that, results would be wrong without an "
            f"error. Fix: install torch {' or '.join(TESTED)}."
        )


def uninstall() -> None:
    """Undo `install`; the next DTensor installs again."""
    while _undo:
        _undo.pop()()
    before_first_dtensor(install)


before_first_dtensor(install)
