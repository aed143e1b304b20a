"""Loops over prefetched batches beside the same loops without."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Mesh, Shard
from shardwise._trace.comm_trace import CommEvent, Listener, listening_with
from shardwise.embedding import (
    SGD,
    Adam,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    prefetch,
    shard_embeddings,
)
from shardwise.errors import ArgumentError, IdTypeError, JaggedError, PlanError
from shardwise.testing import world
from tests.embedding.tables import (
    CONFIGS,
    FEATURES,
    GRIDS,
    SHARDINGS,
    PlacementsOf,
    batch_of,
    collection,
    equal,
    overwrite_given_back,
    plans,
    sharded,
    tables_of,
    values_of,
)

STEPS = 6


def long_batch(rank: int, step: int) -> KeyedJaggedTensor:
    """A batch with more ids than a message of usual length has; how many differs from rank to rank."""
    g = torch.Generator().manual_seed(77 * step + rank)
    lengths = torch.randint(0, 400 * (1 + rank), (4 * 7,), generator=g)
    ids = [
        torch.randint(n, (int(x.sum()),), generator=g) for n, x in zip(FEATURES.values(), lengths.split(7), strict=True)
    ]
    return KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=lengths)


def batches_of(rank: int, count: int = STEPS, **kind: bool) -> list[KeyedJaggedTensor]:
    """Ragged batches. Step 1 has no bags, and step 2 of rank 0 no ids; steps 3 and 5 are long, unless weighted."""
    weighted = kind.get("weighted", False)
    return [
        long_batch(rank, step) if step in {3, 5} and not weighted else batch_of(rank, step, **kind)
        for step in range(count)
    ]


def loss_of(flat: Tensor) -> Tensor:
    return (flat.sin() * torch.linspace(-1, 1, len(flat))).sum()


def train(module: Any, batches: Iterable[KeyedJaggedTensor]) -> list[Tensor]:
    """The results of each batch."""
    outer = None if module.fused_optimizer else torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for batch in batches:
        flat = values_of(module(batch))
        loss_of(flat).backward()
        if outer is not None:
            outer.step()
            outer.zero_grad()
        found.append(flat.detach())
    return found


# ---- results ------------------------------------------------------------------------------------------------


def beside_no_prefetch(mesh: Mesh, plan: PlacementsOf, depths: tuple[int, ...], kind: str) -> None:
    """Bit for bit. The second time the ranks know how long messages are."""
    if collectives.rank() not in mesh.ranks:
        return
    weighted, rows = kind == "weighted", kind == "rows"
    batches = batches_of(collectives.rank(), variable=kind in ("variable", "rows"), weighted=weighted)
    plain, *others = (
        shard_embeddings(collection(not rows, CONFIGS, weighted), plan, mesh, None if kind == "dense" else Adam(lr=0.1))
        for _ in (0, *depths)
    )
    expected = [train(plain, batches) for _ in range(2)]
    for module, depth in zip(others, depths, strict=True):
        for once in expected:
            assert equal(train(module, prefetch(batches, module, depth=depth)), once), f"depth {depth}"
        assert equal(tables_of(module), tables_of(plain)), f"depth {depth}"


on_processes = partial(pytest.param, marks=pytest.mark.processes)
KINDS = ["sums", "variable", "weighted", "rows", "dense", "rows"]  # for each of SHARDINGS


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_steps_equal_those_without_prefetch(sharding: str) -> None:
    number = SHARDINGS.index(sharding)
    size = (2, 3, 3, 4, 1, 3)[number]
    world(size).run(beside_no_prefetch, Mesh((size,)), plans(size)[sharding], (1, 1 + number % 3), KINDS[number])


def test_memory_of_messages_ahead_is_not_given_back_early(monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite_given_back(monkeypatch)
    world(3).run(beside_no_prefetch, Mesh((3,)), plans(3)["mixed"], (2,), "sums")


@pytest.mark.parametrize("grid", [pytest.param(x, marks=pytest.mark.slow if i else ()) for i, x in enumerate(GRIDS)])
def test_grids(grid: str) -> None:
    plan = {"t0": GRIDS[grid], "t1": GRIDS[grid]}
    world(4).run(beside_no_prefetch, Mesh((2, 2), names=("host", "rank")), plan, (2,), "sums")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_kind_size_and_depth(sharding: str) -> None:
    for size, kind in product([1, 2, 3, 4], dict.fromkeys(KINDS)):
        world(size).run(beside_no_prefetch, Mesh((size,)), plans(size)[sharding], (1, 2, 3), kind)


@pytest.mark.parametrize("depth", [1, 20])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_short_loaders(count: int, depth: int) -> None:
    def run() -> None:
        module, batches = sharded("row", 2, Adam(0.1)), batches_of(collectives.rank(), count)
        assert list(map(id, prefetch(batches, module, depth=depth))) == list(map(id, batches))
        assert len(prefetch(batches, module)) == count

    with pytest.warns(UserWarning, match="looked up none") if count else pytest.MonkeyPatch.context():
        world(2).run(run)


class Events(Listener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def record(self, event: CommEvent) -> None:
        self.said.append(event.cause.op.removesuffix(" of an embedding collection"))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("skipped", [-1, 1])
@world(2)
def test_ids_travel_while_the_batch_in_front_trains(depth: int, skipped: int) -> None:
    module, events = sharded("row", 2, Adam(0.1)), Events()
    batches = [batch_of(collectives.rank(), step) for step in (0, 3, 4, 5)]
    chosen = (one for step, one in enumerate(prefetch(batches, module, depth=depth)) if step != skipped)
    with listening_with(events), count_comms() as comms:
        train(module, chosen)
    ahead = " ids" * depth
    of_steps = [f"ids results{ahead} gradients"] + ["results ids gradients"] * 3
    if skipped > 0:
        of_steps[skipped] = "ids"
    assert events.said == " ".join(of_steps).split()
    assert comms.total_calls == len(events.said)


# ---- models, and what a batch is --------------------------------------------------------------------------------


@dataclass
class Clicks:
    dense: Tensor
    shown: list[Any]


class Towers(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        config = EmbeddingBagConfig(20, 4, "words", feature_names=["word"])
        self.bags = sharded("mixed", mesh, Adam(0.1))
        self.words = nn.ModuleDict({"query": shard_embeddings(EmbeddingBagCollection([config]), {}, mesh, SGD(lr=0.1))})

    def forward(self, features: KeyedJaggedTensor, words: KeyedJaggedTensor) -> Tensor:
        return torch.cat([values_of(self.bags(features)), values_of(self.words["query"](words))])


def words_of(rank: int, step: int) -> KeyedJaggedTensor:
    lengths = torch.tensor([step % 3, rank])
    return KeyedJaggedTensor(["word"], torch.arange(int(lengths.sum())) + step, lengths=lengths)


FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]], Callable[[Any], Any] | None]] = {
    "tuple": (lambda a, b: (torch.ones(2), a, [b]), lambda x: (x[1], x[2][0]), None),
    "dict": (lambda a, b: {"a": a, "b": (b, "text"), "c": None}, lambda x: (x["a"], x["b"][0]), None),
    "dataclass": (lambda a, b: Clicks(torch.ones(2), [a, b]), lambda x: (x.shown[0], x.shown[1]), None),
    "by name": (lambda a, b: (a, a, b), lambda x: x[::2], lambda x: {"words.query": x[2], "bags": x[0]}),
}


@pytest.mark.parametrize("form", FORMS)
@world(2)
def test_two_collections_and_batches_of_any_form(form: str) -> None:
    make, read, ids_of = FORMS[form]
    rank, found = collectives.rank(), []
    for use in (False, True):
        torch.manual_seed(1)
        model = Towers(Mesh((2,)))
        batches = [make(batch_of(rank, step), words_of(rank, step)) for step in range(STEPS)]
        outs: list[Tensor] = []
        with count_comms() as comms:
            for batch in prefetch(batches, model, ids_of, depth=2) if use else batches:
                outs.append(model(*read(batch)))
                loss_of(outs[-1]).backward()
        assert comms.total_calls == 2 * (3 * STEPS + (2 if use else 0))  # so both used what was prefetched
        found.append([*outs, *tables_of(model)])
    assert equal(*found)


UNCLEAR: dict[str, tuple[Any, Any, str]] = {
    "no features": (
        (torch.ones(2),),
        None,
        "none of the 0 KeyedJaggedTensors in a batch has all features .* f0, f1, g1, f2",
    ),
    "two": ((batch_of(0, 0), batch_of(0, 1)), None, "2 of the 2 KeyedJaggedTensors in a batch"),
    "no KeyedJaggedTensor": ((batch_of(0, 0),), lambda x: x, "ids_of must return .* got tuple"),
    "another name": ((batch_of(0, 0),), lambda x: {"bag": x[0]}, r"got dict with the keys \['bag'\]"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_ids_that_are_not_clear_are_an_error(case: str) -> None:
    batch, ids_of, text = UNCLEAR[case]
    model = nn.Sequential(sharded({}, 1))
    with pytest.raises(ArgumentError, match=text):
        next(iter(prefetch([batch], model, ids_of)))


def test_arguments() -> None:
    module = sharded({}, 1)
    with pytest.raises(PlanError, match="Linear has no sharded collection"):
        prefetch([], nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="depth must be at least 1, got 0"):
        prefetch([], module, depth=0)
    with pytest.raises(TypeError, match="generator has no length"):
        len(prefetch((x for x in [batch_of(0, 0)]), module))


# ---- other uses of the collection -----------------------------------------------------------------------------


def uses_between(module: Any, use: bool) -> list[Tensor]:
    """Training with evaluations between, a loop that is left, and lookups outside loops."""
    rank = collectives.rank()
    ahead = partial(prefetch, model=module, depth=2) if use else iter
    batches, found = batches_of(rank), list[Tensor]()
    for step, batch in enumerate(ahead(batches)):
        if step % 3 == 2:
            with torch.no_grad():
                found += [values_of(module(one)) for one in ahead(batches[4:])]
                found.append(values_of(module(batches[(step + 1) % STEPS])))  # one that is on its way, too
        if step == 3:
            continue  # not looked up
        found += train(module, [batch])
        if step == 4:
            break
    found += train(module, [batch, batches[5], batches[4]])
    it = iter(ahead(batches))
    first = next(it)
    with torch.inference_mode():
        found += [values_of(module(one)).clone() for one in (batches[2], first)]
        second_of_evaluation = next(it)
    found += train(module, [second_of_evaluation])
    found += train(module, [first, first])  # the second time its ids are sent again
    second, third = next(it), next(it)
    found += train(module, [second, third])  # the third waits meanwhile
    del it
    found += train(module, ahead(batches))
    return [*found, *tables_of(module)]


def uses(sharding: str) -> None:
    assert equal(*(uses_between(sharded(sharding, 3, Adam(0.1)), use) for use in (False, True)))


@pytest.mark.parametrize(("sharding", "real"), [("row", False), ("mixed", False), on_processes("mixed", True)])
def test_any_other_use_between_works(sharding: str, real: bool) -> None:
    world(3, real=real).run(uses, sharding)


@world(2)
def test_a_batch_for_one_collection_is_looked_up_by_another() -> None:
    first, second = (sharded("row", 2, Adam(0.1)) for _ in range(2))
    expected = values_of(second(batch_of(collectives.rank(), 0)))
    for batch in prefetch([batch_of(collectives.rank(), 0)], first):
        assert equal([values_of(second(batch)), values_of(first(batch))], [expected, expected])


def copied() -> None:
    module, other = (sharded("row", 2, Adam(0.1)) for _ in range(2))
    batches = batches_of(collectives.rank())
    copies = (batch.permute([3, 2, 1, 0]) for batch in prefetch(batches, module))
    assert equal(train(module, copies), train(other, batches))


def test_a_loop_whose_collection_never_gets_the_batches_warns() -> None:
    with pytest.warns(UserWarning, match=r"the ids of 6 batches to the owners of collection '', which looked up none"):
        world(2).run(copied)


CHANGES: dict[str, Callable[[KeyedJaggedTensor], object]] = {
    "ids": lambda batch: batch.values().zero_(),
    "lengths": lambda batch: batch.lengths().copy_(batch.lengths().flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
@world(2)
def test_a_batch_that_is_changed_after_its_ids_were_sent_is_an_error(change: str) -> None:
    module = sharded("row", 2, Adam(0.1))
    before = tables_of(module)
    for batch in prefetch([batch_of(collectives.rank(), step) for step in (0, 3)], module):
        CHANGES[change](batch)
        with pytest.raises((IdTypeError, JaggedError), match=r"changed after its ids were sent|changed in place"):
            module(batch)
    assert equal(tables_of(module), before)


# ---- errors of ranks -------------------------------------------------------------------------------------------


def outcome(module: Any, batches: Iterable[KeyedJaggedTensor]) -> str:
    try:
        train(module, batches)
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return ""


class BrokenError(Exception):
    pass


def raising(batches: list[KeyedJaggedTensor], rank: int) -> Iterator[KeyedJaggedTensor]:
    yield from batches
    if collectives.rank() == rank:
        raise BrokenError("no more disk")
    yield batch_of(0, 7)


def loaders(case: str, depth: int) -> str:
    """What a rank raises if the loaders give only three batches on all ranks; and these have trained."""
    rank = collectives.rank()
    module, other = (sharded("mixed", 3, Adam(0.1)) for _ in range(2))
    batches: list[KeyedJaggedTensor] = batches_of(rank)
    given: dict[str, Iterable[KeyedJaggedTensor]] = {
        "shorter": batches[: 3 if rank == 1 else 4],
        "much longer": batches[: 6 if rank == 2 else 3],
        "raises": raising(batches[:3], 1),
        "raises and ends": raising(batches[:3], 1) if rank else batches[:3],
    }
    text = outcome(module, prefetch(given[case], module, depth=depth))
    train(other, batches[:3])
    assert equal(tables_of(module), tables_of(other))
    assert equal(train(module, prefetch(batches[2:], module)), train(other, batches[2:]))  # and it can be used again
    return text


def texts_of(case: str, depth: int, real: bool) -> list[str]:
    return world(3, real=real).run(loaders, case, depth)


@pytest.mark.parametrize(("depth", "real"), [(1, False), (2, False), (3, False), on_processes(3, True)])
def test_loaders_of_different_lengths_are_the_same_error_on_all_ranks(depth: int, real: bool) -> None:
    (text,) = set(texts_of("shorter", depth, real))
    assert text.startswith("MismatchError: The loader of rank 1 has ended after 3 batches, that of rank 0 has not")
    (text,) = set(texts_of("much longer", depth, real))
    assert text.startswith("MismatchError: The loader of rank 0 has ended after 3 batches, that of rank 2 has not")


@pytest.mark.parametrize(("depth", "real"), [(1, False), (3, False), on_processes(1, True)])
@pytest.mark.parametrize("case", ["raises", "raises and ends"])
def test_all_ranks_hear_of_a_loader_that_raises_after_earlier_batches_have_trained(
    case: str, depth: int, real: bool
) -> None:
    first, second, third = texts_of(case, depth, real)
    assert second == "BrokenError: no more disk"
    for text in first, third:
        assert text.startswith("RemoteRankError: The loader of rank 1 raised at batch 3, counted from 0")


def bad_batch(fault: str, depth: int) -> list[str]:
    """What a rank raises at batch 3, which is bad on rank 1; the others train."""
    rank = collectives.rank()
    module, other = (sharded("mixed", 3, Adam(0.1)) for _ in range(2))
    batches = batches_of(rank)
    good, texts = batches[:3] + batches[4:], list[str]()
    if rank == 1:
        keys = ["f0"] if fault == "a missing feature" else list(FEATURES)
        ids = torch.full((len(keys),), 99 if fault == "a bad id" else 0)
        batches[3] = KeyedJaggedTensor(keys, ids, lengths=torch.ones(len(keys)).long())
    for step, batch in enumerate(prefetch(batches, module, lambda batch: batch, depth=depth)):
        before = tables_of(module) if step == 3 else []
        text = outcome(module, [batch])
        assert (text == "") == (step != 3)
        if step == 3:
            texts.append(text)
            assert equal(tables_of(module), before)
    train(other, good)
    assert equal(tables_of(module), tables_of(other))
    return texts


@pytest.mark.parametrize("depth", [1, 3])
def test_a_bad_id_and_a_batch_that_a_rank_could_not_take_are_errors_where_they_are_used(depth: int) -> None:
    ((text,),) = set(map(tuple, world(3).run(bad_batch, "a bad id", depth)))
    assert text.startswith("IdError: Table t0, feature f0: id 99 at position 0 of sample 0 of rank 1 is not")
    found = world(3).run(bad_batch, "a missing feature", depth)
    assert found[1][0].startswith("IdTypeError: The input has no feature 'f1'")
    for (text,) in found[0], found[2]:
        assert text.startswith("RemoteRankError: Rank 1 could not take its batch")


def different_depths(depths: list[int]) -> str:
    module = sharded("row", 2, Adam(0.1))
    before = [table.to_local().clone() for table in module.parameters()]
    batches, depth = batches_of(collectives.rank()), depths[collectives.rank()]
    text = outcome(module, prefetch(batches, module, depth=depth) if depth else batches)
    assert equal([table.to_local() for table in module.parameters()], before)
    return text


@pytest.mark.parametrize(
    ("depths", "real"), [([1, 2], False), ([3, 1], False), ([1, 0], False), ([0, 2], False), on_processes([1, 2], True)]
)
def test_ranks_that_prefetch_differently_all_raise(depths: list[int], real: bool) -> None:
    for text in world(2, real=real).run(different_depths, depths):
        assert text.startswith("MismatchError: ")  # of the messages, or of the lines that start them


@pytest.mark.processes
def test_on_some_of_the_processes() -> None:
    plan: PlacementsOf = {"t0": Shard(0), "t1": Shard(1)}
    world(3, real=True).run(beside_no_prefetch, Mesh((2,), ranks=(0, 2)), plan, (1, 3), "sums")
