"""Where the host waits for an accelerator in a step of a sharded collection, and how many ops the step has there.

Both are read from the device of device.cpp. `WAITS` has the places in the library.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

import shardwise
from shardwise import Mesh, OnRanks, Placement, Shard
from shardwise._collectives import rank
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    prefetch,
    shard_embeddings,
)
from shardwise.embedding.sharded import ShardedEmbeddingBagCollection as Bags
from shardwise.embedding.sharded import ShardedEmbeddingCollection as Rows

LIBRARY, TESTS = Path(shardwise.__file__).parent, Path(__file__).parents[1]
BRIDGE = LIBRARY / "_torch_bridge"  # its callers are the places
BAGS, WARM = 32, 2  # of a feature; steps before the one that is looked at
ROWS = (400, 230, 640, 70)

Place = tuple[str, str]  # file:function of the library, and op
EVERY: dict[Place, int] = {
    ("embedding/batch.py:_bad", "copy to the CPU"): 1,
    ("embedding/batch.py:_bad", "aten::_local_scalar_dense"): 1,
    ("embedding/batch.py:_of_ids", "copy"): 1,
    ("_rules/row_exchange.py:id_message", "copy"): 1,
    ("_rules/row_exchange.py:read", "copy to the CPU"): 1,
    ("embedding/kernels/plain.py:by_row", "aten::nonzero"): 2,  # of each stack, as the next
    ("embedding/kernels/plain.py:_long_bags", "copy to the CPU"): 2,
}
WAITS = {  # of a step, also with `prefetch` and whatever the number of tables
    "bags": EVERY | {
        ("embedding/exchange/requests.py:_runs", "aten::_local_scalar_dense"): 1,
        ("embedding/exchange/requests.py:request_bags", "copy to the CPU"): 1,
    },
    "few": EVERY | {  # bags that have ids
        ("embedding/exchange/requests.py:is_sparse", "aten::_local_scalar_dense"): 1,
        ("embedding/exchange/requests.py:_request_occupied", "aten::unique_consecutive"): 1,
        ("embedding/exchange/requests.py:_request_occupied", "copy to the CPU"): 1,
        ("embedding/exchange/results.py:result_index", "aten::_local_scalar_dense"): 1,
    },
    "rows": EVERY | {
        ("embedding/sharded.py:_request", "aten::_local_scalar_dense"): 1,
        ("_lookups/ids.py:distinct_ids", "aten::unique_consecutive"): 1,
        ("embedding/exchange/requests.py:_row_uses", "copy to the CPU"): 2,
        ("embedding/sharded.py:forward", "copy to the CPU"): 1,
    },
}  # fmt: skip


@dataclass
class Step:
    """The waits of a step, and its ops."""

    waits: Counter[Place] = field(default_factory=Counter)
    ops: int = 0

    def see(self, op: bytes, waits: bool, runs: bool) -> None:
        """An op on the device; those of the test and of its backend are left out."""
        frame = sys._getframe().f_back
        while frame is not None:  # which it is in a thread of autograd, of an op of the test
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(TESTS):
                return
            if path.is_relative_to(LIBRARY) and not path.is_relative_to(BRIDGE):
                self.ops += runs
                if waits:
                    self.waits[f"{path.relative_to(LIBRARY)}:{frame.f_code.co_name}", op.decode()] += 1
                return
            frame = frame.f_back


@contextmanager
def watching(library: Path) -> Iterator[Step]:
    """What the block does on the device of `library`."""
    step, device = Step(), ctypes.CDLL(str(library))
    shown = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_bool, ctypes.c_bool)(step.see)
    device.watch(shown)
    try:
        yield step
    finally:
        device.watch(None)


def made(count: int, rows: bool, mesh: Mesh) -> Bags | Rows:
    """A collection of `count` tables that are row-, column- and table-wise."""
    kinds: list[Placement] = [Shard(0), Shard(1), OnRanks(0), OnRanks(1)]
    plan = {f"t{n}": kinds[n % len(kinds)] for n in range(count)}
    tables = [EmbeddingBagConfig(ROWS[n % len(ROWS)], 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(count)]
    collection = EmbeddingCollection(tables, device="meta") if rows else EmbeddingBagCollection(tables, device="meta")
    return shard_embeddings(collection, plan, mesh, RowWiseAdagrad(lr=0.1))


def batches(count: int, few: bool, device: str) -> list[KeyedJaggedTensor]:
    """Of `count` features, as many for each rank, on the device; `few`: most bags are empty, else none."""
    generator = torch.Generator().manual_seed(rank())
    keys, found = [f"f{n}" for n in range(count)], list[KeyedJaggedTensor]()
    rows = torch.tensor([ROWS[n % len(ROWS)] for n in range(count)])
    for _ in range(WARM + 3):
        lengths = torch.randint(2, 4, (count, BAGS), generator=generator)
        lengths = lengths // 3 * (lengths.roll(1) // 3) if few else lengths
        ids = torch.randint(0, max(ROWS), (int(lengths.sum()),), generator=generator)
        ids %= rows.repeat_interleave(lengths.sum(1))
        found.append(KeyedJaggedTensor(keys, ids, lengths=lengths.view(-1)).to(device))
    return found


def train(module: Bags | Rows, batch: KeyedJaggedTensor) -> None:
    found = module(batch)
    parts = [x.values() for x in found.values()] if isinstance(found, dict) else [found.values()]
    torch.cat([part.reshape(-1) for part in parts]).square().sum().backward()


def step_of(module: Bags | Rows, given: Sequence[KeyedJaggedTensor], ahead: bool, library: Path) -> Step:
    """The step after `WARM` others, with the receipt of the next batch if it is `ahead`."""
    steps: Iterator[KeyedJaggedTensor] = iter(prefetch(given, module)) if ahead else iter(given)
    for _ in range(WARM):
        train(module, next(steps))
    batch = next(steps)
    with watching(library) as step:
        train(module, batch)
        batch = next(steps)
    train(module, batch)
    return step


def check_steps(library: Path, device: str) -> None:
    """Compare the waits of a step with `WAITS`, and the ops of few and many tables. Two ranks call it."""
    mesh = Mesh((2,), (0, 1), None, device)
    for kind, expected in WAITS.items():
        few, rows = kind == "few", kind == "rows"
        module, many = made(4, rows, mesh), made(26, rows, mesh)
        alone = step_of(module, batches(4, few, device), False, library)
        ahead = step_of(module, batches(4, few, device), True, library)
        of_many = step_of(many, batches(26, few, device), False, library)
        for step in (alone, ahead, of_many):
            assert step.waits == expected, f"{kind}: {dict(step.waits)}"
        grown = 22 if rows else 0  # the sum of the lengths of each feature
        assert (ahead.ops, of_many.ops) == (alone.ops, alone.ops + grown), f"{kind}: {alone}, {ahead}, {of_many}"
