"""The state of a module and its optimizers under names that depend on no layout and no number of ranks."""

import warnings
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from os import PathLike
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwise._layout import checked
from shardwise.checkpoint.collective_errors import on_all_ranks
from shardwise.checkpoint.differences import format_lines
from shardwise.checkpoint.export import Collection
from shardwise.checkpoint.loading import Wanted, load_into
from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.module_state import check_extra_state, extra_state, fillable, is_extra, load_filled
from shardwise.checkpoint.optimizer_states import state_of_new_row
from shardwise.checkpoint.optimizers import PREFIX, OptimizersFit, by_name, fit_optimizers, optimizer_state
from shardwise.checkpoint.resizing import Rows, as_rows, resize_argument, resized
from shardwise.checkpoint.schedulers import SCHEDULERS, fit_schedulers, scheduler_state
from shardwise.checkpoint.state import MODEL
from shardwise.embedding.tables import TableWeight
from shardwise.errors import IN_PARENTHESES, CheckpointError, did_you_mean

_FIX = (
    "make optimizers and schedulers as those that were saved; strict=False loads what fits, and says in `dropped` what "
    "does not"
)


@checked
def state_of(
    module: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer] | None = None,
    schedulers: LRScheduler | Mapping[str, LRScheduler] | Sequence[LRScheduler] | None = None,
) -> dict[str, Any]:
    """The argument of `save` from which `restore` resumes training.

        save(folder, state_of(model, {"layers": adam, "tables": tables.fused_optimizer}, {"layers": cosine}), step=7)

    The names are `model.<parameter or persistent buffer>`, `optimizer.<parameter>.<state key>`,
    `optimizer.param_groups`, which has the class, parameters and hyper-parameters of each group, and
    `optimizer.schedulers`. A parameter with several names has the first one only. Name prefixes of
    `DistributedDataParallel` and `torch.compile` around the module are left out.

    Args:
        optimizer: one, or several of different parameters, such as the `fused_optimizer` of a sharded collection beside
            the optimizer of other parameters. Without names they are called "0", "1", …
        schedulers: of learning rates, named in the same way.

    Raises:
        CheckpointError: an optimizer has a parameter that `module` lacks, or two optimizers have the same.
        PlanError: states of tables that have no layout.
    """
    module = _unwrapped(module)
    of_module = module.state_dict(keep_vars=True)
    for name in filter(is_extra, of_module):
        check_extra_state(name, of_module[name])
    state: dict[str, Any] = _model_state(of_module)
    if optimizers := by_name(optimizer):
        _warn_of_left_out(module, optimizers.values())
        state |= optimizer_state(module, optimizers)
    if named := by_name(schedulers):
        state[SCHEDULERS] = scheduler_state(named)
    return state


def _warn_of_left_out(module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Name collections whose tables would resume without the states of their optimizer."""
    known = list(map(id, optimizers))
    for path, child in module.named_modules():
        fused = getattr(child, "fused_optimizer", None)
        if isinstance(fused, Optimizer) and id(fused) not in known:
            name = path or type(child).__name__
            text = f"{name}.fused_optimizer is not among the optimizers, so the states of its tables are not saved."
            warnings.warn(f"{text} Fix: state_of(module, [optimizer, module.{name}.fused_optimizer]).", stacklevel=3)


@dataclass(frozen=True)
class Restored(Manifest):
    """The manifest of a checkpoint that was restored.

    Attributes:
        dropped: with `strict=False`, the entries of optimizers and schedulers that do not fit, a line each.
    """

    dropped: tuple[str, ...] = ()


@checked
def restore(
    folder: str | PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer] | None = None,
    schedulers: LRScheduler | Mapping[str, LRScheduler] | Sequence[LRScheduler] | None = None,
    *,
    extra: MutableMapping[str, Any] | None = None,
    subset: bool = False,
    strict: bool = True,
    resize: Mapping[str, int | Rows] | None = None,
) -> Restored:
    """Load a checkpoint of `state_of` into a module, its optimizers and schedulers, fresh or used.

    Optimizer states are found by the names of their parameters, and made with their layouts if they do not exist yet;
    schedulers by their own names. Hyper-parameters are loaded, as with torch, except the choice of implementation
    (fused, foreach, …). A state of [rows, shards of columns] of a sharded collection becomes the mean over these shards
    if their number differs.

    Args:
        folder: a checkpoint, or the folder or URL that it was saved to, which means its latest one.
        optimizer, schedulers: as for `state_of`.
        extra: what was saved beside `state_of(...)`; filled in place.
        subset: whether the checkpoint may hold more, for example the optimizer when only the module is wanted.
        strict: whether optimizers and schedulers that do not fit are refused. Otherwise what fits is loaded: all states
            of a parameter or none; the hyper-parameters of a group with the same class and names of states. `dropped`
            of the result lists the rest.
        resize: as for `load`, by the names of parameters: `{"tables.embedding_bags.items.weight": 1200}`. New rows are
            those of a new table, or filled by `init_fn`; their optimizer states are those of a row without gradients.

    Raises:
        CheckpointError: as `load`; or optimizers or schedulers of other classes, groups, names of hyper-parameters, or
            names and shapes of states. Nothing was changed.
    """
    module, given = _unwrapped(module), {} if extra is None else extra
    optimizers, named = by_name(optimizer), by_name(schedulers)
    fit, state, of_module, of_schedulers = OptimizersFit(), dict[str, Any](), dict[str, Any](), dict[str, Any]()

    def choose(manifest: Manifest) -> Wanted:
        nonlocal fit, state, of_module, of_schedulers
        rows, of_module = _rows(manifest, module, optimizers, as_rows(resize)), fillable(module)
        of_module |= {x: extra_state(manifest, MODEL + x, own) for x, own in of_module.items() if is_extra(x)}
        state = _model_state(of_module)
        if both := sorted(state.keys() & given.keys()):
            raise CheckpointError(f"extra cannot hold {both[0]!r}, which is of the module. Fix: rename it")
        fit, of_schedulers = _fit(manifest := resized(manifest, rows), module, optimizers, named, subset)
        state |= {**given, **fit.room(manifest)}
        here = {name: of for name, of in rows.items() if name in state or name not in fit.known}
        lines = format_lines(fit.differences) if strict else ()
        return Wanted(state, lines, fit.known, partial(_row_fix, module), _FIX, here)

    manifest = load_into(folder, choose, subset)
    of_module.update({name: state[MODEL + name] for name in of_module if MODEL + name in state})
    on_all_ranks(f"Loading {folder}, in load_state_dict of the module,", lambda: load_filled(module, of_module))
    given.update({key: state[key] for key in given})
    fit.apply(state)
    for name, of_scheduler in of_schedulers.items():
        named[name].load_state_dict(of_scheduler)
    dropped = () if strict else tuple(format_lines(fit.differences))
    return Restored(**{field.name: getattr(manifest, field.name) for field in fields(Manifest)}, dropped=dropped)


def _fit(
    manifest: Manifest,
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    schedulers: Mapping[str, LRScheduler],
    subset: bool,
) -> tuple[OptimizersFit, dict[str, dict[str, Any]]]:
    """The `OptimizersFit` of a checkpoint with the differences of schedulers, and the states of schedulers."""
    fit = fit_optimizers(manifest, module, optimizers, subset) if optimizers else OptimizersFit()
    if not schedulers:
        return fit, {}
    states, differences = fit_schedulers(manifest, schedulers, fit.orders, subset)
    return replace(fit, differences=[*fit.differences, *differences], known={*fit.known, SCHEDULERS}), states


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers for data parallelism and `torch.compile`, which prefix its names."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif [*module._modules] == ["_orig_mod"]:
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _model_state(of_module: Mapping[str, Any]) -> dict[str, Any]:
    """The module's state under the names of a checkpoint, each tensor once."""
    seen: set[int] = set()
    state = {}
    for name, value in of_module.items():
        if isinstance(value, Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        state[MODEL + name] = value
    return state


def _row_fix(module: nn.Module, name: str, stored_rows: int, rows: int) -> str:
    """The fix for a parameter with other rows in the checkpoint, by its name there."""
    own = name.removeprefix("model.")
    if name == own or own not in dict(module.named_parameters()):
        return ""
    path, _, _ = own.rpartition(".")
    is_table = isinstance(module.get_submodule(path), TableWeight)
    fix = f"restore(…, {resize_argument(own, stored_rows, rows, has_init=is_table)})"
    if is_table:
        fix += f", or collection.resize_({{{path.rpartition('.')[2]!r}: {stored_rows}}}) before restore"
    return fix


def _rows(
    manifest: Manifest, module: nn.Module, optimizers: Mapping[str, Optimizer], resize: Mapping[str, Rows]
) -> dict[str, Rows]:
    """The rows of parameters and of their states, by name in the checkpoint."""
    parameters = dict(module.named_parameters())
    unknown = sorted(resize.keys() - parameters.keys())
    if unknown:
        meant = did_you_mean(unknown[0], parameters, IN_PARENTHESES)
        raise CheckpointError(
            f"resize names {unknown[0]!r}, and the module has no such parameter{meant}. "
            f"Fix: a name of module.named_parameters()"
        )
    owners = {id(p): one for one in optimizers.values() for group in one.param_groups for p in group["params"]}
    found = {}
    for name, rows in resize.items():
        found[f"model.{name}"] = replace(rows, init_fn=rows.init_fn or _initializer(module, name))
        stored, owner = manifest.tensors.get(f"model.{name}"), owners.get(id(parameters[name]))
        if stored is None or owner is None:
            continue
        for key, value in state_of_new_row(owner, parameters[name]).items():
            state = manifest.tensors.get(of_state := f"{PREFIX}{name}.{key}")
            if state is not None and stored.shape[:1] == state.shape[:1]:  # a state of rows
                found[of_state] = Rows(rows.count, partial(nn.init.constant_, val=value))
    return found


def _initializer(module: nn.Module, name: str) -> Callable[[Tensor], object] | None:
    """The function that fills new rows of a table, `<collection>.embedding_bags.<table>.weight`."""
    *path, table, _ = ["", *name.split(".")]
    collection = module.get_submodule(".".join(path[1:-1]))
    configs = collection._configs if isinstance(collection, Collection) else ()
    return next((config.initialize for config in configs if config.name == table), None)
