"""Where parameters are sharded as the batch is, ops all-gather the parameters, and one warning says so."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from shardwise import Mesh, Replicate, Shard, distribute_tensor, shard_module
from shardwise._models import ModelArgs, Transformer
from shardwise.debug import explain
from shardwise.parallel import fully_shard
from shardwise.testing import world
from tests.parallel.one_process import full

ARGS = ModelArgs(n_layers=2, vocab_size=210, max_seq_len=24, dim=96, n_heads=6, dropout_p=0.0)


def test_a_batch_stays_sharded_where_parameters_are_sharded_too() -> None:
    torch.manual_seed(0)
    plain, tokens = Transformer(ARGS), torch.randint(ARGS.vocab_size, (48, 24))
    want = copy.deepcopy(plain)
    want(tokens).square().mean().backward()

    @world(3)
    def run() -> None:
        mesh = Mesh((3,))
        model = copy.deepcopy(plain)
        shard_module(model, {"**": Shard(0)}, mesh=mesh)
        with explain() as sent:
            model(distribute_tensor(tokens, mesh, [Shard(0)])).square().mean().backward()
        names = dict(model.named_parameters())
        moved = {e.cause.operand for e in sent.events if e.cause.kind == "operand" and e.total_bytes}
        assert moved - set(names) <= {"operand 1"}  # the positions, which a sharded table gives as partial sums
        for name, p in want.named_parameters():
            assert p.grad is not None
            assert_close(full(names[name].grad), p.grad)

    run()


@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Replicate(), Shard(0)]], ids=str)
def test_one_warning_names_the_parameter_and_the_axis(placements: list[Shard | Replicate]) -> None:
    axis = f"warned, {placements}"

    def run() -> None:
        mesh = Mesh((2, 2), names=(axis, "other") if placements[0] == Shard(0) else ("other", axis))
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
        shard_module(model, {"**": placements}, mesh=mesh)
        for _ in range(2):
            model(distribute_tensor(torch.ones(400, 6), mesh, placements))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        world(4).run(run)
    (message,) = [f"{warning.filename} {warning.message}" for warning in found]
    assert message.startswith(f"{__file__} linear: 0.weight is sharded on mesh axis {axis!r}, as is its input")


@pytest.mark.filterwarnings("error")
@world(2)
def test_no_warning_of_units_nor_of_parameters_that_stay_sharded() -> None:
    mesh = Mesh((2,), names=("quiet",))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    fully_shard(copy.deepcopy(model), mesh=mesh)(x)
    table = nn.Embedding(10, 4)
    shard_module(table, {"weight": Shard(0)}, mesh=mesh)
    table(distribute_tensor(torch.tensor([1, 9, 4]), mesh, [Shard(0)]))
    shard_module(model, {"0.*": Shard(0), "1.weight": Shard(1)}, mesh=mesh)
    F.relu(model(x.redistribute(mesh, [Replicate()])))
    scores = nn.Linear(6, 800, bias=False)  # larger than the batch, which is all-gathered: scores stay sharded
    shard_module(scores, {"weight": Shard(0)}, mesh=mesh)
    assert scores(x).placements == (Shard(1),)
    grid = Mesh((2, 1), names=("dp", "alone"))  # an axis of one rank
    alone = shard_module(nn.Linear(48, 12, bias=False), {"weight": [Replicate(), Shard(0)]}, mesh=grid)
    alone(distribute_tensor(torch.ones(36, 48), grid, [Shard(0), Shard(1)]))
