"""Places and shares of a batch, beside one process."""

from dataclasses import replace

import pytest
import torch

from shardwise import collectives
from shardwise.demos.data import Batch, PyIdent, Quality, examples, popularity_baseline
from shardwise.demos.data import places as places_in_one_process
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.evaluation import evaluate, neighbours, own_rows, places
from shardwise.demos.recommender.training import Training
from shardwise.layout import Mesh, OnRanks, Placement, Shard
from shardwise.testing import world
from tests.demos.recommender.plain import Full, full_tables, scores

TINY = TrainConfig(dim=6, init_std=1.0)


def initial(config: TrainConfig, data: PyIdent, num_ranks: int, plan: dict[str, Placement]) -> Full:
    found = world(num_ranks).run(lambda: full_tables(Training(config, data, plan).model))
    return found[0]


@pytest.mark.parametrize("num_rows", [114, 7, 2, 1])  # more ranks than rows
@pytest.mark.parametrize(
    "plan", [{}, {"**": Shard(0)}, {"**": Shard(1)}, {"**": OnRanks(1)}, {"items.weight": Shard(0)}]
)
def test_places_equal_one_process(plan: dict[str, Placement], num_rows: int, tiny: PyIdent) -> None:
    batch = examples(tiny, "train").batch(torch.arange(num_rows))
    tables = initial(TINY, tiny, 1, {})
    tables["items"][3] = torch.nan  # counts as ahead of everything
    tables["items"][8] = tables["items"][7]  # with equal popularity, so does what ties
    counts = tiny.train_counts.clone()
    counts[8] = counts[7]
    data = replace(tiny, train_counts=counts)
    expected = places_in_one_process(scores(tables, data, batch), batch)

    def body() -> None:
        run = Training(TINY, data, plan)
        run.model.load_state_dict({f"tables.embedding_bags.{name}.weight": x for name, x in tables.items()})
        assert places(run.model, batch, run.mesh).tolist() == expected.tolist()

    world(3).run(body)


@pytest.mark.parametrize("num_rows", [11, 3, 2, 1])
def test_the_rows_of_all_ranks_make_the_batch_and_cost_nothing(num_rows: int, tiny: PyIdent) -> None:
    batch = examples(tiny, "train").batch(torch.arange(num_rows))

    def body() -> Batch:
        with collectives.count_comms() as comms:
            own = own_rows(batch, Mesh((3,)))
        assert comms.total_calls == 0
        return own

    parts = world(3).run(body)
    for name in ("context_ids", "target", "num_args"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert torch.equal(torch.cat([part.offsets.diff() for part in parts]), batch.offsets.diff())
    assert [len(part) for part in parts] == [
        x.numel() for x in [*torch.arange(num_rows).chunk(3), torch.tensor([]), torch.tensor([])][:3]
    ]


def test_initial_values_depend_on_the_seed_only(tiny: PyIdent) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = initial(TINY, tiny, 1, {})
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    torch.testing.assert_close(initial(TINY, tiny, 3, {"**": Shard(1)}), first, rtol=0, atol=0)
    other = initial(TrainConfig(dim=6, init_std=1.0, seed=1), tiny, 1, {})
    assert not torch.equal(other["context"], first["context"])
    assert not torch.equal(first["context"], first["items"])
    assert not first["num_args"].any()


def test_a_model_that_has_learnt_nothing_is_the_baseline(tiny: PyIdent) -> None:
    assert evaluate_alone(TrainConfig(dim=6, init_std=0.0), tiny) == popularity_baseline(tiny)


def evaluate_alone(config: TrainConfig, data: PyIdent) -> Quality:
    run = Training(config, data, {})
    return evaluate(run.model, data, run.mesh)


def test_no_word_is_its_own_neighbour(tiny: PyIdent) -> None:
    run = Training(TINY, tiny, {})
    with torch.no_grad():
        run.model.table("items").copy_(run.model.table("context")).mul_(10)  # now every word expects itself most
    found = neighbours(run.model, tiny, ("re",), count=len(tiny.vocab))
    assert sorted(["re", *found["re"]]) == sorted(tiny.vocab)
