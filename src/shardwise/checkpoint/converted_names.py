"""Names that `from_pretrained` of transformers converts: the tensors of files under the names of the module.

transformers renames tensors while it loads, and makes one parameter of several tensors, such as a stack of all experts.
Its tables define the conversions. Stacked, concatenated or divided tensors are read from the files box by box. Any
other conversion runs the code of transformers, for one parameter at a time.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shardwise._layout import Box
from shardwise._torch_bridge import module_sharding
from shardwise.checkpoint.files import StoredFile
from shardwise.checkpoint.sources import Extent, Source, SourceTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightRenaming

Parts = dict[str, list[SourceTensor]]
"""The tensors for each pattern of names of a converter."""


@dataclass(frozen=True)
class Converted:
    """Tensors of files under the names of a module."""

    source: Source
    made_of: Mapping[str, list[str]] = field(default_factory=dict)  # the names in the files of each that has another
    problems: Sequence[str] = ()  # names that cannot be converted
    ignored: frozenset[str] = frozenset()  # names in the files that the model passes over

    def described(self, name: str) -> str:
        """The name, and its names in the files if they are different."""
        return f"{name!r}{_of(self.made_of[name])}" if name in self.made_of else repr(name)


def _of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f" (of {names[0]!r}{more} in the files)"


def converted(module: nn.Module, source: Source) -> Converted:
    """The source under the names of `module`; unchanged if it is not a model of transformers 5."""
    transformers = sys.modules.get("transformers.modeling_utils")  # if it is not imported, there is no such model
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return Converted(source)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:  # before 5
        return Converted(source)
    transforms = get_model_conversion_mapping(_Outline(module))
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    return _Names(module, source, renamings, converters).converted()


class _Outline:
    """The submodels of a model, of the classes that they had before `fully_shard`."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.base_model_prefix = model.base_model_prefix
        self._submodels = [(name, _before_sharding(m)) for name, m in model.named_modules() if hasattr(m, "config")]

    def named_modules(self) -> Iterator[tuple[str, object]]:
        yield from self._submodels


def _before_sharding(module: nn.Module) -> nn.Module:
    own = module_sharding.class_before(type(module))
    if own is type(module):
        return module
    found = own.__new__(own)
    vars(found).update(vars(module))
    return found


@dataclass
class _Group:
    """Tensors that become one or more parameters, the first of which is `name`."""

    name: str
    converter: "WeightConverter | None" = None
    names: dict[str, list[str]] = field(default_factory=dict)  # in the files, by pattern

    @property
    def all_names(self) -> list[str]:
        return [name for names in self.names.values() for name in names]


class _Names:
    """The conversion of all names of a source."""

    def __init__(
        self,
        model: "PreTrainedModel",
        source: Source,
        renamings: list["WeightRenaming"],
        converters: list["WeightConverter"],
    ) -> None:
        self.model, self.source = model, source
        self.renamings, self.converters = renamings, converters
        self.state = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        self.problems: list[str] = []
        self.tensors: dict[str, SourceTensor] = {}
        self.made_of: dict[str, list[str]] = {}
        self._made_by: dict[str, tuple[str, Callable[[], dict[str, Tensor]]]] = {}
        self._last: tuple[object, dict[str, Tensor]] = (None, {})

    def converted(self) -> Converted:
        """All tensors; tensors without a name in the module keep theirs."""
        from transformers.core_model_loading import dot_natural_key

        groups: dict[str, _Group] = {}
        ignored = set()
        for name in sorted(self.source.tensors, key=dot_natural_key):
            renamed, pattern = self._renamed(name)
            if renamed not in self.state:
                self.tensors[name] = self.source.tensors[name]
                if any(re.search(found, renamed) for found in self._ignored_patterns()):
                    ignored.add(name)
                continue
            group = groups.setdefault(renamed, _Group(renamed))
            if pattern is not None:
                group.converter = next(c for c in self.converters if pattern in c.source_patterns)
            group.names.setdefault(pattern or name, []).append(name)
        for group in groups.values():
            self._add(group)
        source = Source(self.source.name, self.tensors, {}, self._open, self.source.progress)
        return Converted(source, self.made_of, self.problems, frozenset(ignored))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The name in the module, and the pattern of the converter that makes it."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(name, self.renamings, self.converters, prefix, self.state)
        if found[0] not in self.state and name in self.state:
            return name, None
        return found

    def _ignored_patterns(self) -> list[str]:
        buffers = [name.rpartition(".")[2] for name, _ in self.model.named_buffers()]
        own = [r"rotary_emb\.inv_freq"] * ("inv_freq" in buffers) + [r"(^|\.)position_ids$"] * (
            "position_ids" in buffers
        )
        return [*(self.model._keys_to_ignore_on_load_unexpected or ()), *own]

    def _add(self, group: _Group) -> None:
        converter = group.converter
        if converter is None:
            if len(group.all_names) > 1:
                self._refuse(group, "both are this parameter")
            elif group.all_names != [group.name]:
                self.made_of[group.name] = group.all_names
            self.tensors[group.name] = self.source.tensors[group.all_names[0]]
            return
        try:
            _check_numbers(group)
            made = self._convert(converter, group, lambda name: _on_meta(self.source.tensors[name]))
        except Exception as error:  # noqa: BLE001 - whatever the code of transformers raises
            self._refuse(group, f"{type(error).__name__}: {error}")
            return
        tensors = _read_directly(converter, group, self.source, made)
        if tensors is None:
            tensors = self._computed(made, lambda: self._convert(converter, group, self._read))
        for name, tensor in tensors.items():
            if name in self.tensors:
                self._refuse(replace(group, name=name), f"{self.made_of.get(name, [name])[0]!r} is this parameter, too")
            self.tensors[name], self.made_of[name] = tensor, group.all_names

    def _computed(self, made: Mapping[str, Tensor], make: Callable[[], dict[str, Tensor]]) -> dict[str, SourceTensor]:
        """The parameters of a conversion, with the shapes and dtypes of `made`, as files in memory."""
        found = {}
        for name, x in made.items():
            file, full = f"the conversion of {name}", Box((0,) * x.ndim, tuple(x.shape))
            self._made_by[file] = name, make
            found[name] = SourceTensor(x.dtype, full.sizes, [Extent(file, 0, full)] if full.numel else [])
        return found

    def _open(self, file: str) -> StoredFile:
        return _InMemory(file, self._in_memory) if file in self._made_by else self.source.open_file(file)

    def _in_memory(self, file: str) -> Tensor:
        """The content of a file in memory; only the last conversion is kept."""
        name, make = self._made_by[file]
        if self._last[0] is not make:
            self._last = None, {}  # freed before the next one is made
            self._last = make, make()
        return self._last[1][name]

    def _refuse(self, group: _Group, why: str) -> None:
        names = group.all_names
        self.made_of[group.name] = names
        self.problems.append(f"  {group.name!r} cannot be made{_of(names)}: {why}")

    def _read(self, name: str) -> Tensor:
        return self.source.read(name, self.source.tensors[name].full)

    def _convert(self, converter: "WeightConverter", group: _Group, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The parameters of a group, by the code of transformers, in the dtype of the first one if they have floats."""
        converter = deepcopy(converter)
        dtype = self.state[group.name].dtype
        for pattern, names in group.names.items():
            for name in names:
                x = read(name)
                x = x.to(dtype) if x.is_floating_point() and dtype.is_floating_point else x
                converter.add_tensor(group.name, name, pattern, x)
        made = converter.convert(group.name, model=self.model, config=self.model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in made.items()}


def _check_numbers(group: _Group) -> None:
    """Raise ValueError unless each pattern stacks numbers from 0 without a gap: transformers counts only."""
    for pattern, names in group.names.items():
        if "*" not in pattern or len(names) == 1:
            continue
        columns = [column for column in zip(*(name.split(".") for name in names), strict=False) if len(set(column)) > 1]
        numbers = [int(found) for column in columns for part in column if (found := re.sub(r"\D", "", part))]
        if numbers and numbers != list(range(len(names))):
            raise ValueError(f"{pattern!r} is there for {', '.join(map(str, numbers))}")


def _on_meta(tensor: SourceTensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _read_directly(
    converter: "WeightConverter", group: _Group, source: Source, made: Mapping[str, Tensor]
) -> dict[str, SourceTensor] | None:
    """The extents of the parameters' elements in the files; None if their order differs there."""
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, Split

    parts: Parts = {pattern: [source.tensors[n] for n in names] for pattern, names in group.names.items()}
    if len({tensor.dtype for tensors in parts.values() for tensor in tensors}) > 1:
        return None
    sizes = [x.shape[0] if x.ndim else 0 for x in made.values()]
    for op in converter.operations:
        in_order = [tensor for pattern in converter.source_patterns for tensor in parts.get(pattern, [])]
        if type(op) is MergeModulelist and op.dim == 0:
            parts = {pattern: [_concatenated([_with_dim(t) for t in ts], 0)] for pattern, ts in parts.items()}
        elif type(op) is Concatenate:
            parts = {converter.source_patterns[0]: [_concatenated(in_order, op.dim)]}
        elif type(op) in (Chunk, Split) and op.dim == 0 and len(in_order) == len(in_order[0].extents) == 1:
            parts = {converter.source_patterns[0]: _rows(in_order[0], sizes)}
        else:
            return None
    found = [tensor for tensors in parts.values() for tensor in tensors]
    fit = [tensor.shape for tensor in found] == [tuple(x.shape) for x in made.values()]
    return dict(zip(made, found, strict=True)) if fit else None


def _with_dim(tensor: SourceTensor) -> SourceTensor:
    """The tensor with one more dim, the first, of size 1."""
    moved = [e._replace(box=Box((0, *e.box.offsets), (1, *e.box.sizes))) for e in tensor.extents]
    return tensor._replace(shape=(1, *tensor.shape), extents=moved)


def _concatenated(tensors: Sequence[SourceTensor], dim: int) -> SourceTensor:
    first = tensors[0]
    dim %= len(first.shape)
    sizes = [tensor.shape[dim] for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    extents = [
        e._replace(box=e.box.along(dim, e.box.offsets[dim] + start, e.box.sizes[dim]))
        for tensor, start in zip(tensors, starts, strict=False)
        for e in tensor.extents
    ]
    return first._replace(shape=(*first.shape[:dim], starts[-1], *first.shape[dim + 1 :]), extents=extents)


def _rows(tensor: SourceTensor, counts: Sequence[int]) -> list[SourceTensor]:
    """Tensors of so many rows each, from a tensor that is stored in one place."""
    (extent,) = tensor.extents
    row_bytes = tensor.num_bytes // tensor.shape[0]
    found = []
    for start, count in zip([0, *accumulate(counts)], counts, strict=False):
        shape = (count, *tensor.shape[1:])
        box = Box((0,) * len(shape), shape)
        extents = [extent._replace(start=extent.start + start * row_bytes, box=box)] if box.numel else []
        found.append(tensor._replace(shape=shape, extents=extents))
    return found


class _InMemory:
    """A parameter that transformers converts, as a `StoredFile`."""

    def __init__(self, name: str, tensor: Callable[[str], Tensor]) -> None:
        self.name, self.size, self._tensor = name, 0, tensor

    def read_into(self, buffer: memoryview, offset: int) -> None:
        data = self._tensor(self.name).contiguous().reshape(-1).view(torch.uint8)
        buffer[:] = data[offset : offset + len(buffer)].numpy().data

    def close(self) -> None:
        """Nothing is open."""
