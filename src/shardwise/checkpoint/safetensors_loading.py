"""Safetensors files of Hugging Face into a sharded module: every rank reads its own shards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise._layout import checked
from shardwise._torch_bridge import module_sharding
from shardwise.checkpoint.collective_errors import digest, listed, on_all_ranks, require_same
from shardwise.checkpoint.converted_names import Converted, converted
from shardwise.checkpoint.files import bytes_of
from shardwise.checkpoint.locations import local_path
from shardwise.checkpoint.module_state import fillable, is_extra, load_filled
from shardwise.checkpoint.offline.reading import select_tensors
from shardwise.checkpoint.offline.safetensors_format import open_safetensors
from shardwise.checkpoint.remedies import extra_prefix
from shardwise.checkpoint.sources import Part, Progress, Source, SourceTensor
from shardwise.checkpoint.state import LocalBoxes, fill, new_memory, storable_boxes
from shardwise.errors import IN_PARENTHESES, CheckpointError, did_you_mean

AS_IN_FILES = "make the module as the files have it; of a model of Hugging Face, config.json beside them says how"


class LoadedKeys(NamedTuple):
    """Names that did not match, as torch's `load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@checked
def load_safetensors(
    source: str | PathLike[str], module: nn.Module, *, strict: bool = True, prefix: str = ""
) -> LoadedKeys:
    """Fill a sharded module from safetensors files; all ranks of the world call it.

        parallelize_module(model, mesh, plan_from_transformers(model))
        load_safetensors("downloaded", model)

    No rank reads or holds a full copy of a sharded parameter. Each reads the bytes of its local shards into new CPU
    memory. Where a shard has less than 4 KiB of each row, as of a table sharded by columns, it reads full rows. Values
    are converted to the dtypes of the module, but not floats to integers. When all ranks have read, `load_state_dict`
    loads the values; if anything is wrong on any rank, the module is unchanged.

    For a model of transformers, names are converted as by `from_pretrained`; experts, for example, are stacked. Where a
    conversion reorders elements, every rank reads all tensors of one parameter at a time.

    Args:
        source: a file, or a folder with `model.safetensors.index.json` or `model.safetensors`, which all ranks see.
        module: with DTensors, plain parameters or both. Plain parameters on the meta device get memory first.
        strict: whether the names must be those of the parameters and persistent buffers of the module. One name of a
            tied parameter is enough; if the files have more, their values must be equal.
        prefix: the prefix in the files of the module's names, as "model." if `export_file` got no prefix. Other names
            are passed over.

    Returns:
        The names that only the module has, and those that only the files have.

    Raises:
        CheckpointError: a file is missing or damaged, names cannot be converted, or names, shapes or dtypes do not fit;
            the same text on every rank.
        MismatchError: ranks see different files.
    """
    what = f"Loading {source}"
    with ExitStack() as stack:
        found = stack.enter_context(open_on_all(what, source, prefix))
        names = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in found.tensors.items()}
        chosen: list[_Chosen] = []

        def choose() -> str:
            named = converted(module, found)
            stack.enter_context(named.source)
            chosen.append(_chosen(module, named, strict, prefix))
            return digest(names)

        require_same("Loading safetensors", names, on_all_ranks(what, choose))
        read: list[tuple[dict[str, LocalBoxes], dict[str, Tensor]]] = []
        on_all_ranks(what, lambda: read.append(_read(chosen[0])))
    _fill(chosen[0], *read[0])
    on_all_ranks(f"{what}, in load_state_dict of the module,", lambda: load_filled(module, chosen[0].state))
    return chosen[0].keys


def open_on_all(what: str, source: str | PathLike[str], prefix: str) -> Source:
    """The source, opened on each rank, with the tensors that have `prefix`, without it."""
    opened: list[Source] = []

    def open_source() -> None:
        found = open_safetensors(local_path(source), "", Progress())
        if prefix:
            found.tensors = {name: found.tensors[of] for name, of in select_tensors(found, None, prefix).items()}
        opened.append(found)

    on_all_ranks(what, open_source)
    return opened[0]


class _Chosen(NamedTuple):
    """The module's tensors by their first name in the source."""

    state: dict[str, Any]  # the module loads it when it is filled
    tensors: Mapping[str, Tensor]
    stored: Mapping[str, list[str]]  # all names that the source has of each, more than one if it is tied
    on_meta: Mapping[str, module_sharding.Owners]  # the owners of parameters that get memory first
    keys: LoadedKeys
    source: Source


def _chosen(module: nn.Module, files: Converted, strict: bool, prefix: str) -> _Chosen:
    """The tensor of the source for each tensor of the module; CheckpointError if names or shapes do not fit."""
    source = files.source
    state = fillable(module)
    for name in filter(is_extra, state.keys() & source.tensors.keys()):
        state[name] = torch.empty(source.tensors[name].shape, dtype=source.tensors[name].dtype, device="cpu")
    named = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    names = module_sharding.names_of_each(named)
    tensors = {name: x for name, x in named.items() if name in source.tensors}
    absent = [name for name in named if not any(other in tensors for other in names[name])]
    missing = [name for name in absent if name not in files.made_of]  # others cannot be converted
    unexpected = sorted(source.tensors.keys() - named.keys() - files.ignored)
    problems = list(files.problems) + [
        f"  {files.described(name)}: {problem}"
        for name, x in tensors.items()
        for problem in _misfits(source.tensors[name], x)
    ]
    fix = _other_prefix([names[name] for name in missing], unexpected, prefix)
    if strict or (fix and not tensors):  # loading nothing is an error then
        problems += [
            f"  missing in the files: {name!r}{did_you_mean(name, unexpected, IN_PARENTHESES)}" for name in missing
        ]
        problems += [
            f"  only in the files: {name!r}{did_you_mean(name, missing, IN_PARENTHESES)}" for name in unexpected
        ]
    loaded = {id(x) for x in tensors.values()}
    own = chain(module.named_parameters(), module.named_buffers())
    unset = [name for name, x in own if x.is_meta and id(x) not in loaded]
    problems += [f"  {name!r} is on the meta device, and the files do not have it" for name in unset]
    if problems:
        names_only = strict and (missing or unexpected)
        fix = fix or ("strict=False passes over names that only one has" if names_only else AS_IN_FILES)
        raise CheckpointError(f"the files do not fit the module:\n{listed(problems)}\n  Fix: {fix}")
    on_meta = {name: x for name, x in named.items() if isinstance(x, nn.Parameter) and x.is_meta}
    for name, x in tensors.items():
        if name not in on_meta:
            storable_boxes(name, x)  # it says what cannot be filled
    stored = {name: [other for other in names[name] if other in tensors] for name in tensors}
    once = {name: x for name, x in tensors.items() if name == stored[name][0]}
    for name in state.keys() - tensors.keys():
        del state[name]  # a new mapping would lose the versions of submodules
    return _Chosen(
        state, once, stored, module_sharding.owners_of(module, on_meta), LoadedKeys(missing, unexpected), source
    )


def _other_prefix(missing: Sequence[Sequence[str]], unexpected: Sequence[str], prefix: str) -> str:
    """The fix if names differ only by a prefix, beyond the removed one; "" otherwise."""
    if extra := extra_prefix(missing, unexpected):
        example = next(name for name in unexpected if name.startswith(extra))
        return (
            f"load_safetensors(…, prefix={prefix + extra!r}): the files have {extra!r} before the names of the module, "
            f"as in {example!r}"
        )
    if extra := extra_prefix([[name] for name in unexpected], [name for same in missing for name in same]):
        return (
            f"load_safetensors(…, module.get_submodule({extra[:-1]!r})): the module has {extra!r} before the names of "
            f"the files, as in {extra + unexpected[0]!r}"
        )
    return ""


def _misfits(stored: SourceTensor, x: Tensor) -> Iterator[str]:
    """Why a tensor of the module cannot have the values of the files."""
    if stored.shape != tuple(x.shape):
        yield f"shape {stored.shape} in the files, {tuple(x.shape)} in the module"
    if not torch.can_cast(stored.dtype, x.dtype):
        yield f"{stored.dtype} in the files, which is no kind of {x.dtype} as in the module"
    is_scaled = stored.dtype.is_floating_point and stored.dtype.itemsize == 1  # 8 bits, divided by scales
    if is_scaled and stored.dtype != x.dtype:
        yield f"{stored.dtype} in the files, whose scales nothing applies, {x.dtype} in the module"


def _read(chosen: _Chosen) -> tuple[dict[str, LocalBoxes], dict[str, Tensor]]:
    """This rank's part of each tensor, in new memory, and new tensors for those without memory."""
    source, tensors = chosen.source, chosen.tensors
    new = {
        name: torch.empty(x.shape, dtype=x.dtype, device="cpu") for name, x in tensors.items() if name in chosen.on_meta
    }
    memory, parts = new_memory({name: storable_boxes(name, x) for name, x in tensors.items() if name not in new})
    for name, x in new.items():
        memory[name] = storable_boxes(name, x)
        parts += [Part(name, box, view, bytes_of(view)) for box, view in memory[name].views]
    for name, x in tensors.items():
        if source.tensors[name].dtype != x.dtype:
            for view, values in _windows(memory[name], source, name):
                view.copy_(values)
    source.read_all(part for part in parts if source.tensors[part.name].dtype == part.target.dtype)
    for name in tensors:
        for other in chosen.stored[name][1:]:
            for view, values in _windows(memory[name], source, other):
                if not _equal(view, values.to(view)):
                    raise CheckpointError(
                        f"{name!r} and {other!r} are one parameter of the module, but have different values in "
                        f"the files. Fix: a module where they are not tied."
                    )
    return memory, new


def _fill(chosen: _Chosen, found: Mapping[str, LocalBoxes], new: Mapping[str, Tensor]) -> None:
    device = next((x.device for x in chosen.tensors.values() if not x.is_meta), torch.device("cpu"))
    for name, x in chosen.tensors.items():
        if name not in new:
            fill([storable_boxes(name, x)], [found[name]])
        else:
            parameter = nn.Parameter(new[name].to(device), x.requires_grad)
            module_sharding.assign(chosen.on_meta[name], parameter)
            chosen.state.update(dict.fromkeys(chosen.stored[name], parameter))


def _windows(boxes: LocalBoxes, source: Source, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the local tensors, each with its tensor of the source."""
    for box, view in boxes.views:
        for window in source.tensors[name].windows(box):
            yield view[window.relative_to(box)], source.read(name, window)


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
