"""PyIdent: which functions of the CPython 3.11 standard library use which identifiers.

About 13,600 functions, 3,500 identifiers and 112,000 interactions with a power-law popularity: the size and
skew of MovieLens-100K, real, and bundled (`PSF-LICENSE.txt` beside this file). `scripts/make_pyident.py`
makes the file from an interpreter's own sources. Names and attributes count as used identifiers; keywords,
strings and the names of parameters that the body never mentions do not. An inner function is a function of
its own and also part of the outer one.

One module in ten is held out. The vocabulary is what five or more of the other modules' functions use, so
nothing about the held-out modules is in it; all functions with at least three identifiers of the vocabulary
are there, held out or not: one can be hidden and a bag is left to see.

The file is `MAGIC`, the SHA-256 of the payload, and the payload compressed as xz. The payload is one line of
JSON (`python`, `vocab`, `modules`, `functions`, `interactions`) and four arrays of little-endian uint16:
functions of each module, arguments of each function, identifiers of each function, and the identifiers' ids,
one function after the other. Nothing in it can run code.
"""

import hashlib
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.demos.data.errors import DataError

MAGIC = b"PyIdent\x01"
AGAIN = "Fix: reinstall shardwise, or write the file again with scripts/make_pyident.py."
BUNDLED = Path(__file__).with_name("pyident.bin")
MAX_PAYLOAD = 1 << 24  # bytes; a file that unpacks to more is not ours


class Bags(NamedTuple):
    """One list of ids per function: bag `i` is `values[offsets[i]:offsets[i + 1]]`.

    So `nn.EmbeddingBag` reads it with `include_last_offset=True`. `values` has shape (interactions,),
    `offsets` (functions + 1,), int64.
    """

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, eq=False)
class PyIdent:
    """The data set. All tensors are on the CPU, int64 unless said otherwise.

    Identifiers are ordered by the number of training functions that use them, most frequent first (equal
    counts alphabetically), so an id is a popularity rank and the ids that never occur in training come last.
    Modules and packages are ordered alphabetically, functions by module and then as in the source. A bag
    holds each id once, ascending.

    The split is by module (one file each), so no held-out file is seen in training. Hence the id of a
    held-out module, and of a package with no other module, never occurs in training: an embedding row for it
    keeps its initial value. Initialise such tables to zero if the unseen rows should say nothing.
    """

    vocab: tuple[str, ...]
    """The identifiers; ids index this."""
    modules: tuple[str, ...]
    """Dotted names such as `asyncio.events`."""
    packages: tuple[str, ...]
    """First parts of the modules' names; a top-level module is its own package."""
    bags: Bags
    """The identifiers of each function."""
    module_of: Tensor
    """(functions,) ids into `modules`."""
    package_of: Tensor
    """(functions,) ids into `packages`."""
    num_args: Tensor
    """(functions,) number of parameters, `self`, `*args` and `**kwargs` included."""
    is_test: Tensor
    """(functions,) bool: held out."""
    train_counts: Tensor
    """(identifiers,) number of training functions that use each."""
    python: str
    """The version of the interpreter that read the library."""
    fingerprint: str
    """SHA-256 of the uncompressed content, in hex."""

    @property
    def num_functions(self) -> int:
        """Number of functions, held-out ones included."""
        return len(self.num_args)

    def bag(self, function: int) -> Tensor:
        """The ids of one function, ascending: shape (number of its identifiers,)."""
        return self.bags.values[self.bags.offsets[function] : self.bags.offsets[function + 1]]

    def __repr__(self) -> str:
        return (
            f"PyIdent({self.num_functions:,} functions x {len(self.vocab):,} identifiers, "
            f"{len(self.bags.values):,} interactions, {int(self.is_test.sum()):,} functions held out, "
            f"CPython {self.python}, {self.fingerprint[:12]})"
        )


def is_held_out(module: str) -> bool:
    """Whether a module is for testing: one in ten is, by the MD5 of its dotted name."""
    return int(hashlib.md5(module.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def load_pyident(path: Path | str = BUNDLED) -> PyIdent:
    """The data set bundled with the package, or one that `scripts/make_pyident.py` wrote to `path`.

    Raises:
        DataError: the file is damaged or of another format.
        OSError: the file cannot be read.
    """
    path = Path(path)
    payload = _unpack(path)
    try:
        return _parse(payload)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: the checksum is right but the content is not PyIdent 1: {error}.\n  {AGAIN}"
        ) from error


def _unpack(path: Path) -> bytes:
    """The payload of the file, checked against its SHA-256."""
    content = path.read_bytes()
    head = len(MAGIC)
    if content[:head] != MAGIC:
        raise DataError(
            f"{path}: not a PyIdent file: it starts with {content[:head]!r}, expected {MAGIC!r}.\n  {AGAIN}"
        )
    expected, packed = content[head : head + 32], content[head + 32 :]
    try:
        payload = lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(packed, MAX_PAYLOAD)
    except lzma.LZMAError as error:
        payload, why = b"", f"it does not unpack ({error})"
    else:
        why = f"its SHA-256 is {hashlib.sha256(payload).hexdigest()}, expected {expected.hex()}"
    if hashlib.sha256(payload).digest() != expected:
        raise DataError(f"{path}: damaged: {why}.\n  {AGAIN}")
    return payload


def _parse(payload: bytes) -> PyIdent:
    """Raises ValueError, KeyError, TypeError or AttributeError for a payload that does not fit its header."""
    line, _, data = payload.partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    vocab, modules = tuple(header["vocab"]), tuple(header["modules"])
    functions, interactions = int(header["functions"]), int(header["interactions"])
    sizes = [len(modules), functions, functions, interactions]
    array = torch.from_numpy(np.frombuffer(data, "<u2").astype(np.int64))
    if len(array) != sum(sizes):
        raise ValueError(f"{len(array)} numbers, expected {sum(sizes)}")
    per_module, num_args, lengths, values = array.split(sizes)
    if int(per_module.sum()) != functions or int(lengths.sum()) != interactions:
        raise ValueError("the counts do not add up to the totals of the header")
    if interactions and int(values.max()) >= len(vocab):
        raise ValueError(f"id {int(values.max())} is outside the vocabulary of {len(vocab)}")

    packages = tuple(sorted({module.partition(".")[0] for module in modules}))
    package_ids = {package: i for i, package in enumerate(packages)}
    package_of_module = torch.tensor([package_ids[m.partition(".")[0]] for m in modules], dtype=torch.int64)
    held_out = torch.tensor([is_held_out(m) for m in modules], dtype=torch.bool)
    module_of = torch.arange(len(modules)).repeat_interleave(per_module)
    is_test = held_out[module_of]
    return PyIdent(
        vocab=vocab,
        modules=modules,
        packages=packages,
        bags=Bags(values, F.pad(lengths.cumsum(0), (1, 0))),
        module_of=module_of,
        package_of=package_of_module[module_of],
        num_args=num_args,
        is_test=is_test,
        train_counts=values[~is_test.repeat_interleave(lengths)].bincount(minlength=len(vocab)),
        python=str(header["python"]),
        fingerprint=hashlib.sha256(payload).hexdigest(),
    )
