"""Everything that shardwise changes in torch. The list is also a page, docs/reference/torch-patches.md.

`install` runs before the first DTensor of the process is made, not on import; `uninstall` undoes it.
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

from shardwise._tensor.autograd.functions import apply_with_dtensors, refusing_transform, saving_layouts, with_layouts
from shardwise._tensor.dispatch.without_memory import without_modes
from shardwise._tensor.dtensor import DTensor, before_first_dtensor
from shardwise._tensor.handlers.bypasses import (
    asking,
    data_of_alike,
    full_gradients,
    new_without_dtensors,
    refusing,
    refusing_hooks_of_nodes,
    refusing_traces,
    taking_numbers,
)
from shardwise._tensor.handlers.indexing import zero_padding_row
from shardwise._tensor.handlers.lists import total_norm_in_one_exchange
from shardwise._tensor.handlers.optimizers import step_on_locals
from shardwise._tensor.replicas import check_fully_shard, checking, refusing_simulated
from shardwise._tensor.state_dicts import keeping_layouts, sharding_states, staging_locals, with_dtensors
from shardwise._tensor.transforms import FORWARD_MODE
from shardwise.errors import RuleError

TESTED = ("2.13", "2.14")


@dataclass(frozen=True)
class Patch:
    """One attribute of torch that is replaced.

    Attributes:
        target: its full name.
        what: what the replacement does.
        why: why no official hook does.
        without: what breaks without it.
        replacement: from the original, as it lies in its module or class, to what takes its place.
        listed: how the page of patches names it, if the target depends on the version of torch.
        module: that holds the target, if only some programs import it: it is replaced when they do.
    """

    target: str
    what: str
    why: str
    without: str
    replacement: Callable[[Any], Any]
    module: str | None = None
    listed: str = ""

    def original(self) -> tuple[Any, str, Any]:
        """The module or class, the attribute's name and its present value."""
        owner_name, _, name = self.target.rpartition(".")
        try:
            owner = pkgutil.resolve_name(owner_name)
            return owner, name, inspect.getattr_static(owner, name)
        except (ImportError, AttributeError):
            raise RuleError(
                f"torch {torch.__version__} has no {self.target}, which shardwise has to replace, because without it "
                f"{self.without}. Fix: install torch {' or '.join(TESTED)}."
            ) from None


@dataclass(frozen=True)
class Hook:
    """An official hook of torch or Python that is used in the entire process."""

    target: str
    what: str
    since: str


_SUBCLASS = "torch offers `__torch_function__` for ops only"


def _with_dtensor(types: list[type]) -> list[type]:
    return [*types, DTensor]


def _made_of_local_shards(replacement: Callable[[Any], Any], what: str, names: str) -> tuple[Patch, ...]:
    """Patches of functions, by their names in torch, that make a plain tensor of a DTensor's local shard."""
    why = "torch asks no subclass here, neither by `__torch_function__` nor by any method."
    without = "it silently uses the local shard"
    return tuple(Patch(f"torch.{name}", what, why, without, replacement) for name in names.split())


def _transforms(what: str, *targets: str) -> tuple[Patch, ...]:
    """Patches of functions that begin or end a transform of `torch.func`."""
    why = f"{_SUBCLASS}; `torch.func` wraps the local tensor in another one, which is no subclass any more."
    text, without = f"Refuses a DTensor in {what}.", "the transform silently takes, or returns, the local shard"
    return tuple(Patch(f"torch._functorch.{name}", text, why, without, refusing_transform(what)) for name in targets)


# Since torch 2.14 `Function` has an `apply` of its own; before, it calls that of its base, which may be bound already.
_OWN_APPLY = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)
_BINDING = "A function of C++ that takes a list of tensors, without `__torch_function__`."

PATCHES = (
    Patch(
        "torch.autograd.function.Function.apply"
        if _OWN_APPLY
        else "torch.autograd.function._SingleLevelFunction.apply",
        "Runs a custom Function on DTensors: forward and backward see DTensors, and gradients may be returned in any "
        "placements. In torch 2.14 it is `Function.apply` that is replaced. Also puts a Function of shardwise in the "
        "place of the one that carries full backward hooks of modules. Calls without a DTensor, and without a tensor "
        "that needs a gradient, go to the original.",
        f"{_SUBCLASS}: `apply` passes a subclass to `forward` as it is, and local gradients to `backward`.",
        "custom autograd Functions and module backward hooks get local tensors for gradients",
        apply_with_dtensors,
        listed="torch.autograd.function._SingleLevelFunction.apply",  # in torch 2.13
    ),
    Patch(
        "torch.utils.checkpoint._CheckpointFrame.save_inputs",
        "Also remembers the layouts of the inputs of a checkpoint.",
        "torch unpacks a saved subclass as a plain tensor if saved-tensor hooks are active, as in another checkpoint.",
        "a nested checkpoint recomputes local tensors as if they were global",
        saving_layouts,
    ),
    Patch(
        "torch.utils.checkpoint._CheckpointFrame.get_inputs",
        "Returns the inputs with their layouts.",
        "The same as for `save_inputs`.",
        "a nested checkpoint recomputes local tensors as if they were global",
        with_layouts,
    ),
    *_transforms("torch.func.vmap", "vmap._add_batch_dim", "vmap._remove_batch_dim"),
    *_transforms(
        "torch.func.grad, vjp, jvp or a jacobian",
        "eager_transforms._wrap_tensor_for_grad",
        "eager_transforms._unwrap_for_grad",
    ),
    *_transforms(FORWARD_MODE, "predispatch._make_dual", "predispatch._unpack_dual"),
    *_transforms("torch.func.functionalize", "eager_transforms._maybe_wrap_functional_tensor"),
    Patch(
        "torch.optim.optimizer._foreach_supported_types",
        "The list with `DTensor` added: optimizers use their foreach implementation by default.",
        "torch has no function that adds a type; its own DTensor appends to the same list.",
        "an optimizer step dispatches every op of every parameter on its own",
        _with_dtensor,
    ),
    Patch(
        "torch.utils._foreach_utils._foreach_supported_types",
        "The list with `DTensor` added: `clip_grad_norm_` uses `torch._foreach_norm`.",
        "The same as for optimizers.",
        "clipping gradients takes one exchange a parameter",
        _with_dtensor,
    ),
    Patch(
        "torch.nn.utils.clip_grad._get_total_norm",
        "Computes the norm over all DTensors of one mesh in one exchange, without a DTensor for each norm.",
        f"{_SUBCLASS}.",
        "clipping stacks one 0-d DTensor a parameter, which takes twice the time",
        total_norm_in_one_exchange,
    ),
    Patch(
        "torch.nn.modules.module.Module._load_from_state_dict",
        "A DTensor of torch in the place of a DTensor, or the reverse, is converted. With `assign=True` a plain tensor "
        "in the place of a DTensor is sharded as that is.",
        "torch assigns or copies it without any call that knows both; hooks of modules are registered one by one.",
        "`load_state_dict(full, assign=True)` of a sharded module silently makes its parameters plain",
        keeping_layouts,
    ),
    Patch(
        "torch.optim.optimizer.Optimizer._process_value_according_to_param_policy",
        "A state with the shape of its parameter gets the sharding of that.",
        "Hooks of optimizers see states before they are assigned to parameters, or after, without the parameters.",
        "`optimizer.load_state_dict(full)` keeps full states on all ranks, and DTensors of torch beside ours",
        sharding_states,
    ),
    Patch(
        "torch.distributed._state_dict_utils._iterate_state_dict",
        "Gathers, copies and offloads DTensors; if and when it is imported.",
        "It knows torch's DTensor only.",
        "`get_model_state_dict(full_state_dict=True)` returns DTensors",
        with_dtensors,
        "torch.distributed._state_dict_utils",
    ),
    Patch(
        "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
        "Copies the local tensor of a DTensor; if and when it is imported.",
        "It copies storages by address, and new tensors into these.",
        "`torch.distributed.checkpoint.async_save` refuses a DTensor",
        staging_locals,
        "torch.distributed.checkpoint._state_dict_stager",
    ),
    *(
        Patch(
            f"torch.nn.modules.sparse.{name}._fill_padding_idx_with_zero",
            "Sets the padding row by its index.",
            "It fills a view of the row, which is a copy where rows are sharded.",
            "`reset_parameters()` of a table with a padding row is refused where its rows are sharded",
            lambda original: zero_padding_row,
        )
        for name in ("Embedding", "EmbeddingBag")
    ),
    Patch(
        "torch.nn.modules.batchnorm.SyncBatchNorm.forward",
        "Refuses a plain input in training on simulated ranks.",
        "It asks `torch.distributed` for its ranks, which knows real processes only.",
        "each simulated rank silently normalises by the statistics of its own part of the batch",
        refusing_simulated,
    ),
    Patch(
        "torch.distributed._verify_params_across_processes",
        "Refuses DTensors of which the ranks of the group hold different shards.",
        _BINDING,
        "`DistributedDataParallel` of a sharded module overwrites the shards of all ranks by those of rank 0",
        checking(lambda group, tensors, *_: (tensors, group)),
    ),
    Patch(
        "torch.distributed._broadcast_coalesced",
        "The same, for wrappers that broadcast parameters or buffers without a comparison.",
        _BINDING,
        "`_sync_module_states` and `broadcast_buffers` overwrite the shards of all ranks by those of one",
        checking(lambda group, tensors, *_: (tensors, group)),
    ),
    Patch(
        "torch.distributed.Reducer",
        "The same, for `DistributedDataParallel(init_sync=False)`, before its reducer is made.",
        _BINDING,
        "gradients of different shards are averaged",
        checking(lambda tensors, buckets, sizes, group, *_, **__: (tensors, group)),
    ),
    Patch(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.__init__",
        "The same, for `fully_shard`, which warns of DTensors; if and when torch's FSDP is imported.",
        f"{_SUBCLASS}; it chunks parameters and gathers plain buffers.",
        "`fully_shard` over ranks that hold different shards gathers chunks of different shards, or aborts",
        checking(lambda group, params, modules, mesh_info, *_, **__: (params, mesh_info.mesh), check_fully_shard),
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    ),
    Patch(
        "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer._init_local_optimizer",
        "The same, for `ZeroRedundancyOptimizer`; if and when it is imported.",
        "It broadcasts plain tensors, such as those of `local_parameters`.",
        "it overwrites local parameters by those of a rank that holds other shards",
        checking(lambda optimizer: (optimizer._all_params, optimizer.process_group)),
        "torch.distributed.optim.zero_redundancy_optimizer",
    ),
    *_made_of_local_shards(asking, "Makes a DTensor of a DTensor.", "tensor as_tensor asarray Tensor.new_tensor"),
    *_made_of_local_shards(
        taking_numbers(0),
        "Takes the number that a 0-d DTensor holds.",
        "full scalar_tensor arange range eye randperm randint tril_indices triu_indices",
    ),
    *_made_of_local_shards(
        taking_numbers(1), "Takes the number that a 0-d DTensor holds.", "full_like Tensor.new_full"
    ),
    *_made_of_local_shards(
        asking,
        "Refuses a DTensor with an error.",
        "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
        "sparse_compressed_tensor to_dlpack utils.dlpack.to_dlpack _C._to_dlpack _C._to_dlpack_versioned Tensor.new "
        "Tensor.set_ Tensor.as_subclass autograd.graph.get_gradient_edge",
    ),
    *_made_of_local_shards(new_without_dtensors, "Refuses a DTensor with an error.", "Tensor.__new__"),
    *_made_of_local_shards(
        refusing("A kernel of torch.cuda.jiterator"),
        "Refuses DTensors with an error, in functions that `torch.cuda.jiterator` makes.",
        "cuda.jiterator._JittedFunction.__call__",
    ),
    *_made_of_local_shards(
        refusing(), "Refuses DTensors with an error.", "nested.nested_tensor nested.as_nested_tensor"
    ),
    *_made_of_local_shards(
        refusing("A masked tensor"), "Refuses DTensors with an error.", "masked.maskedtensor.core.MaskedTensor.__new__"
    ),
    *_made_of_local_shards(data_of_alike, "Refuses a DTensor as the data of a plain tensor.", "Tensor.data"),
    *_made_of_local_shards(
        refusing("TorchScript"),
        "Refuses DTensors with an error.",
        "jit.ScriptFunction.__call__ ScriptMethod.__call__ ScriptObject.setattr",
    ),
    *_made_of_local_shards(
        full_gradients, "Takes a DTensor as the gradient of a plain tensor, by gathering it.", "autograd._make_grads"
    ),
    *_made_of_local_shards(
        refusing_traces("torch.jit.trace"), "Refuses to trace functions of DTensors.", "jit.trace jit.trace_module"
    ),
    Patch(
        "torch.fx.experimental.proxy_tensor._MakefxTracer.trace",
        "Refuses to trace functions of DTensors in `make_fx`.",
        "Its mode sees the ops of the local tensors.",
        "`make_fx` returns a graph of local ops",
        refusing_traces("make_fx"),
    ),
    Patch(
        "torch.autograd.function._HookMixin._register_hook",
        "Refuses hooks of a node of the graph that was read as `grad_fn` of a DTensor, except those of torch.",
        "The class of a node cannot be changed, and a node does not know that its tensor is a DTensor.",
        "hooks of nodes silently get, and return, local gradients",
        refusing_hooks_of_nodes,
    ),
)

HOOKS = (
    Hook(
        "torch.optim.optimizer.register_optimizer_step_pre_hook",
        "Elementwise optimizers take a step on the local tensors where parameters, gradients and states share layouts.",
        "the first DTensor",
    ),
    Hook(
        "sys.meta_path",
        "Replaces the attributes of FSDP and ZeroRedundancyOptimizer after these are imported, which shardwise does "
        "not do.",
        "the first DTensor",
    ),
    Hook(
        "sys.excepthook",
        "Reports the uncaught exception of this rank to the other ranks, then calls the hook that was there.",
        "the first world of several processes",
    ),
    Hook(
        "threading.excepthook",
        "Notes the uncaught exception of a thread for the error that other ranks may raise, then calls the hook that "
        "was there.",
        "the first world of several processes",
    ),
)

# ---- modules that are imported later ----------------------------------------------------------------------------


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


# ---- installing -------------------------------------------------------------------------------------------------

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Apply all patches. Runs by itself before the first DTensor; a second call does nothing.

    Raises:
        RuleError: this torch lacks an attribute to replace, or does something else; nothing was changed.
    """
    if _undo:
        return
    if not torch.__version__.startswith(tuple(f"{version}." for version in TESTED)):
        warnings.warn(
            f"shardwise is tested with torch {' and '.join(TESTED)}, not with torch {torch.__version__}.", stacklevel=2
        )
    _check_silent_names()
    _device_constructors()  # cached: torch's set of functions that take a default device keeps the originals
    now = [patch for patch in PATCHES if patch.module is None or patch.module in sys.modules]
    originals = [(patch, *patch.original()) for patch in now]
    for found in originals:
        _apply(*found)
    _undo.append(register_optimizer_step_pre_hook(step_on_locals).remove)
    _undo.append(forget_imports)
    for patch in PATCHES:
        if patch.module is not None and patch not in now:
            after_import(patch.module, partial(_apply_later, patch))


def _apply(patch: Patch, owner: Any, name: str, value: object) -> None:
    inherited = name not in vars(owner)
    setattr(owner, name, patch.replacement(value))
    _undo.append(_delete(owner, name) if inherited else _restore(owner, name, value))


def _apply_later(patch: Patch) -> None:
    """Apply a patch in an import of the user's code, which goes on without it."""
    try:
        found = patch.original()
    except RuleError as error:
        warnings.warn(str(error), stacklevel=2)
    else:
        _apply(patch, *found)


class _Subclass(Tensor):
    """For `_check_silent_names`."""


def _check_silent_names() -> None:
    """Try what no error would show if torch stopped doing it.

    Raises:
        RuleError: it did.
    """
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
    lost = [what for what, is_there in works.items() if not is_there]
    if lost:
        raise RuleError(
            f"torch {torch.__version__} has lost {'; '.join(lost)}. Without that, results would be wrong without an "
            f"error. Fix: install torch {' or '.join(TESTED)}."
        )


def _delete(owner: object, name: str) -> Callable[[], None]:
    return lambda: delattr(owner, name)


def _restore(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def uninstall() -> None:
    """Undo `install`; the next DTensor installs again."""
    while _undo:
        _undo.pop()()
    before_first_dtensor(install)


before_first_dtensor(install)
