"""Places and shares of a batch, beside one process."""

import pytest
import torch

from shardwise import collectives
from shardwise.demos.data import PyIdent, Quality, examples, popularity_baseline
from shardwise.demos.data import places as places_in_one_process
from shardwise.demos.recommender.batches import Inputs, plain_inputs, shard_batch
from shardwise.demos.recommender.config import TrainConfig
from shardwise.demos.recommender.evaluation import evaluate, neighbours, places
from shardwise.demos.recommender.training import Training, build
from shardwise.layout import Mesh, OnRanks, Placement, Shard
from shardwise.parallel.shard_module import shard_module
from shardwise.tensor import DTensor
from shardwise.testing import world

TINY = TrainConfig(dim=6, init_std=1.0)


@pytest.mark.parametrize("num_rows", [114, 7, 2, 1])  # more ranks than rows
@pytest.mark.parametrize(
    "plan", [{}, {"**": Shard(0)}, {"**": Shard(1)}, {"**": OnRanks(1)}, {"items.weight": Shard(0)}]
)
def test_places_equal_one_process(plan: dict[str, Placement], num_rows: int, tiny: PyIdent) -> None:
    batch = examples(tiny, "train").batch(torch.arange(num_rows))
    model = build(TINY, tiny)
    with torch.no_grad():
        model.items.weight[3] = torch.nan  # counts as ahead of everything
        model.items.weight[8] = model.items.weight[7]  # with equal popularity, so does what ties
        model.log_popularity[8] = model.log_popularity[7]
        x = plain_inputs(batch)
        expected = places_in_one_process(model(x.context_ids, x.offsets, x.num_args), batch)

    def body() -> None:
        mesh, mine = Mesh((3,)), build(TINY, tiny)
        mine.load_state_dict(model.state_dict())
        shard_module(mine, plan, mesh=mesh, src_rank=None)
        assert places(mine, batch, mesh).tolist() == expected.tolist()

    world(3).run(body)


@pytest.mark.parametrize("num_rows", [11, 3, 2, 1])
def test_the_shares_of_a_batch_make_the_batch_and_cost_nothing(num_rows: int, tiny: PyIdent) -> None:
    batch = examples(tiny, "train").batch(torch.arange(num_rows))

    def body() -> Inputs:
        with collectives.count_comms() as comms:
            shared = shard_batch(batch, Mesh((3,)))
        assert comms.total_calls == 0
        joined = {}
        for name, x in vars(shared).items():
            assert isinstance(x, DTensor)
            joined[name] = x.full_tensor()
        ids, offsets = shared.context_ids.to_local(), shared.offsets.to_local()  # type: ignore[attr-defined]
        if len(offsets):  # a rank has the ids of its own rows
            first = int(offsets[0])
            last = [*batch.offsets.tolist()][batch.offsets.tolist().index(int(offsets[-1])) + 1]
            assert ids.tolist() == batch.context_ids[first:last].tolist()
        return Inputs(**joined)

    for shared in world(3).run(body):
        torch.testing.assert_close(vars(shared), vars(plain_inputs(batch)), rtol=0, atol=0)


def test_initial_values_depend_on_the_seed_only(tiny: PyIdent) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = build(TINY, tiny).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    torch.testing.assert_close(build(TINY, tiny).state_dict(), first, rtol=0, atol=0)
    other = build(TrainConfig(dim=6, init_std=1.0, seed=1), tiny)
    assert not torch.equal(other.context.weight, first["context.weight"])


def test_a_model_that_has_learnt_nothing_is_the_baseline(tiny: PyIdent) -> None:
    assert evaluate_alone(TrainConfig(dim=6, init_std=0.0), tiny) == popularity_baseline(tiny)


def evaluate_alone(config: TrainConfig, data: PyIdent) -> Quality:
    run = Training(config, data, {})
    return evaluate(run.model, data, run.mesh)


def test_no_word_is_its_own_neighbour(tiny: PyIdent) -> None:
    run = Training(TINY, tiny, {})
    with torch.no_grad():
        run.model.items.weight.copy_(run.model.context.weight).mul_(10)  # now every word expects itself most
    found = neighbours(run.model, tiny, ("re",), count=len(tiny.vocab))
    assert sorted(["re", *found["re"]]) == sorted(tiny.vocab)
