"""`context_parallel`: models of plain tensors train on parts of a sequence as one process does on all of it."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from shardwise import DTensor, Mesh, Shard, count_comms, distribute_tensor
from shardwise import _collectives as collectives
from shardwise.errors import LayoutError, MeshError, RuleError
from shardwise.experimental import context_parallel, context_parallel_unshard
from shardwise.experimental.context import _spans
from shardwise.testing import world
from tests.parallel.one_process import raised

GENERATOR = torch.Generator().manual_seed(2)
attention: Callable[..., Any] = F.scaled_dot_product_attention


class Model(nn.Module):
    """A causal layer with rotary embeddings and few heads of keys, and one of `nn.MultiheadAttention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def layer(self, x: Tensor, cos: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2) * cos
        k, v = self.kv(x).unflatten(-1, (4, 2)).transpose(1, 2).chunk(2, 1)
        attended: Tensor = attention(q, k * cos, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return x + mixed

    def forward(self, ids: Tensor, cos: Tensor, recompute: bool = False) -> Tensor:
        x = self.embedding(ids)
        x = checkpoint(self.layer, x, cos, use_reentrant=False) if recompute else self.layer(x, cos)
        logits: Tensor = self.head(x + self.attention(x, x, x, need_weights=False)[0])
        return logits


def batch(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels, and a table of rotary embeddings that is a view of a longer one."""
    ids, labels = torch.randint(11, (2, 2, length), generator=torch.Generator().manual_seed(3))
    return ids, labels, torch.arange(20.0).view(10, 2).sin()[:length]


def model() -> Model:
    torch.manual_seed(1)
    return Model().double()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (3, 7), (3, 2), (1, 5)])
def test_values_and_gradients_equal_one_process(ranks: int, length: int, recompute: bool) -> None:
    """With lengths that the ranks do not divide, and with fewer positions than ranks."""
    ids, labels, cos = batch(length)
    single = model()
    expected = single(ids, cos)
    loss_of(expected, labels).backward()

    def body() -> tuple[Tensor, list[Any]]:
        mine, mesh, buffers = model(), Mesh((ranks,)), list(batch(length))
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0]):
            logits = mine(buffers[0], buffers[2], recompute)
            loss_of(logits, buffers[1]).backward()
            (full,) = context_parallel_unshard(mesh, [logits], [1])
        for x, original in zip(buffers, (ids, labels, cos), strict=True):
            assert torch.equal(x, original)
        return full, [p.grad for p in mine.parameters()]

    results = world(ranks).run(body)
    for full, _ in results:
        assert_close(full, expected)
    for of_ranks, p in zip(zip(*(grads for _, grads in results), strict=True), single.parameters(), strict=True):
        assert_close(torch.stack(of_ranks).sum(0), p.grad)


def test_groups_of_a_2d_mesh_have_sequences_of_their_own() -> None:
    x = torch.randn(2, 6, 4, generator=GENERATOR, dtype=torch.float64)
    expected = attention(x, x, x, is_causal=True)

    def body() -> Tensor:
        mesh = Mesh((2, 2), names=("dp", "cp"))
        mine = x[collectives.rank() // 2].clone()
        with context_parallel(mesh["cp"], buffers=[mine], buffer_seq_dims=[0]):
            return context_parallel_unshard(mesh["cp"], [attention(mine, mine, mine, is_causal=True)], [0])[0]

    for rank, got in enumerate(world(4).run(body)):
        assert_close(got, expected[rank // 2])


@pytest.mark.parametrize(("length", "ranks"), [(48, 4), (13, 3), (2, 4), (0, 2)])
def test_positions_are_divided_once_and_causal_work_evenly(length: int, ranks: int) -> None:
    parts = [[p for first, n in of_rank for p in range(first, first + n)] for of_rank in _spans(length, ranks)]
    assert sorted(p for part in parts for p in part) == list(range(length))
    work = [sum(p + 1 for p in part) for part in parts]
    assert max(work) - min(work) <= (0 if length % (2 * ranks) == 0 else 2 * length)


@world(4)
def test_traffic_of_a_causal_step() -> None:
    """Each rank sends keys and values to all others, each once."""

    x = torch.zeros(2, 8, 4)
    with context_parallel(Mesh((4,)), buffers=[x], buffer_seq_dims=[1]), count_comms() as comms:
        attention(x, x, x, is_causal=True)
    assert (comms.total_calls, comms.total_bytes) == (3, 3 * 2 * (2 * 2 * 4) * 4)


def test_a_block_stops_at_the_last_rank_that_needs_it() -> None:
    """Of two positions on four ranks, rank 1 needs that of rank 0; ranks 2 and 3 have no queries."""

    def body(causal: bool) -> int:
        x = torch.zeros(2, 2, 4)
        with context_parallel(Mesh((4,)), buffers=[x], buffer_seq_dims=[1]), count_comms() as comms:
            attention(x, x, x, is_causal=causal)
        return comms.total_bytes

    block = 2 * (2 * 1 * 4) * 4
    assert world(4).run(body, True) == [block, 0, 0, 0]
    assert world(4).run(body, False) == [block, block, block, block]  # that of rank 1 passes ranks 2 and 3


class Products(TorchDispatchMode):
    """How many multiplications the matrix products take; those of shapes alone take none."""

    multiplications: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and args[0].device.type != "meta":
            self.multiplications += args[0].numel() * args[1].shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_rank_computes_as_many_scores_and_none_of_later_keys(ranks: int) -> None:
    """The two chunks of queries of a rank attend to 2 n + 1 chunks of keys; without a mask to 2 n each."""

    def work(causal: bool) -> int:
        x = torch.zeros(2, 4 * ranks, 3)
        products = Products()  # type: ignore[no-untyped-call]
        with context_parallel(Mesh((ranks,)), buffers=[x], buffer_seq_dims=[1]), products:
            leaf = x.clone().requires_grad_()
            attention(leaf, leaf, leaf, is_causal=causal).sum().backward()
        return products.multiplications

    causal, full = (world(ranks).run(work, is_causal) for is_causal in (True, False))
    assert full[0] > 0
    assert [n * 4 * ranks for n in causal] == [n * (2 * ranks + 1) for n in full]
    assert len({*causal}) == 1


@world(2)
def test_buffers_are_restored_in_place_also_after_an_error_and_those_named_keep_their_part() -> None:
    table = torch.arange(12.0).view(6, 2)
    view, kept = table[1:5], torch.arange(4)
    pointer = view.data_ptr()

    def fail() -> None:
        with block([view, kept], [0, 0], {kept}):
            assert view.shape == (2, 2)
            view.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(table, torch.arange(12.0).view(6, 2))
    assert view.data_ptr() == pointer
    assert kept.tolist() == ([0, 3] if collectives.rank() == 0 else [1, 2])


@contextmanager
def block(buffers: list[Tensor], dims: list[int], kept: set[Tensor] | None = None) -> Iterator[None]:
    with context_parallel(Mesh((2,)), buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=kept):
        yield


# ---- never silently another value ----------------------------------------------------------------------------


@world(2)
def test_backward_after_the_block_is_an_error_if_it_needs_what_the_block_had() -> None:
    x, w = torch.ones(4), torch.ones((), requires_grad=True)
    with block([x], [0]):
        out = (x * w).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@world(2)
def test_a_checkpoint_that_recomputes_after_the_block_is_an_error() -> None:
    x = torch.ones(1, 1, 4, 2)
    with block([x], [2]):
        leaf = x.clone().requires_grad_()
        out = checkpoint(lambda y: attention(y, y, y), leaf, use_reentrant=False).sum()
    with pytest.raises(CheckpointError):
        out.backward()


X = torch.ones(1, 2, 4, 2)
REFUSED_INSIDE: list[tuple[str, Callable[[Tensor], object]]] = [
    ("an attn_mask", lambda x: attention(x, x, x, torch.ones(2, 2))),
    ("dropout", lambda x: attention(x, x, x, dropout_p=0.1)),
    ("2 positions", lambda x: attention(x, torch.ones(1, 2, 4, 2), torch.ones(1, 2, 4, 2))),
    ("DTensor", lambda x: attention(*[distribute_tensor(x, Mesh((2,)), [Shard(1)])] * 3)),
    ("need_weights=False", lambda x: nn.MultiheadAttention(2, 1)(x[0], x[0], x[0])),
]


@pytest.mark.parametrize(("text", "call"), REFUSED_INSIDE, ids=[text for text, _ in REFUSED_INSIDE])
def test_attention_that_would_see_only_a_part_is_refused(text: str, call: Callable[[Tensor], object]) -> None:
    def act() -> None:
        x = X.clone()
        with block([x], [2]):
            call(x)

    said = raised(RuleError, act)
    assert re.search(text, said)
    assert "Fix: " in said


@world(2)
def test_heads_that_torch_refuses_are_refused() -> None:
    x = X.clone()
    with block([x], [2]), pytest.raises(RuntimeError):
        attention(x.repeat(1, 2, 1, 1), x, x)


def sharded() -> DTensor:
    return distribute_tensor(X, Mesh((2,)), [Shard(2)])


REFUSED: list[tuple[str, type[Exception], Callable[[], AbstractContextManager[None]]]] = [
    ("no buffers", LayoutError, lambda: block([], [])),
    ("1 buffers and 2 buffer_seq_dims", LayoutError, lambda: block([X], [2, 2])),
    ("not one of buffers", LayoutError, lambda: block([X], [2], {torch.ones(4)})),
    ("a DTensor", LayoutError, lambda: block([sharded()], [2])),
    ("requires grad", LayoutError, lambda: block([X.clone().requires_grad_()], [2])),
    ("twice", LayoutError, lambda: block([X, X], [2, 2])),
    ("dim 4", LayoutError, lambda: block([X], [4])),
    (r"\[4, 2\] positions", LayoutError, lambda: block([X, X.clone()], [2, 1])),
    ("one axis", MeshError, lambda: context_parallel(Mesh((2, 1)), buffers=[X], buffer_seq_dims=[2])),
]


@pytest.mark.parametrize(("text", "kind", "enter"), REFUSED, ids=[text for text, *_ in REFUSED])
def test_bad_arguments_are_refused(
    text: str, kind: type[Exception], enter: Callable[[], AbstractContextManager[None]]
) -> None:
    def act() -> None:
        with enter():
            pass

    said = raised(kind, act)
    assert re.search(text, said)
    assert "Fix: " in said
    assert X.shape == (1, 2, 4, 2)


@world(2)
def test_lengths_that_no_sequence_has_are_not_unsharded() -> None:
    with pytest.raises(LayoutError, match="Fix: "):
        context_parallel_unshard(Mesh((2,)), [torch.ones(1 + 3 * collectives.rank())], [0])
    with pytest.raises(LayoutError, match="1 buffers and 0 seq_dims"):
        context_parallel_unshard(Mesh((2,)), [torch.ones(2)], [])
