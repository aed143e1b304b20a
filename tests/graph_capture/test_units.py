"""A replay of units of `fully_shard` gives what they give, and all-gathers what optimizer steps wrote."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from shardwise import Mesh, Replicate, Shard, capture, distribute_tensor
from shardwise._models import Transformer
from shardwise.errors import CaptureError
from shardwise.testing import world
from tests.parallel.one_process import full
from tests.parallel.units import (
    ARGS,
    assert_trained_alike,
    batches,
    batches_of_all,
    copied,
    mean_loss,
    model_args,
    sharded,
    train,
    transformer,
)

OPTIONS: dict[int, dict[str, Any]] = {2: {"prefetch": 2}, 3: {}, 4: {"reshard_after_forward": 2}}  # by ranks
FEW = [(2, True, True), (3, True, False), (4, False, True)]


@pytest.mark.parametrize(
    ("ranks", "tying", "recompute"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in product(OPTIONS, (True, False), (True, False))
    ],
)
def test_captured_units_train_as_one_process(ranks: int, tying: bool, recompute: bool) -> None:
    args = model_args(tying, recompute, 0)

    def run() -> None:
        mesh = Mesh((ranks,))
        found = sharded(transformer(args), mesh, **OPTIONS[ranks])
        step = capture(lambda tokens: mean_loss(found, tokens))
        trained = train(found, batches_of_all(5, mesh), lambda _, tokens: step(tokens))
        assert len(step.graphs()) == 1
        assert_trained_alike(trained, args, 5)

    world(ranks).run(run)


@world(4)
def test_captured_units_beside_tensor_parallelism() -> None:
    mesh = Mesh((2, 2), names=("dp", "tp"))
    found = sharded(Transformer.parallelize(transformer(ARGS), mesh, False, gather_output=False), mesh["dp"])
    of_all = [distribute_tensor(x, mesh, [Shard(0), Replicate()]) for x in batches(4)]
    step = capture(lambda tokens: mean_loss(found, tokens))
    trained = train(found, of_all, lambda _, tokens: step(tokens))
    assert len(step.graphs()) == 1
    assert_trained_alike(trained, ARGS, 4)


@world(2)
def test_what_was_gathered_before_the_trace_is_not_replayed() -> None:
    model, (tokens, *_) = transformer(replace(ARGS, n_layers=1)), batches(4)
    mesh = Mesh((2,))
    found, want = sharded(copied(model), mesh), copied(model)
    of_all = distribute_tensor(tokens, mesh, [Shard(0)])
    step = capture(lambda x: mean_loss(found, x))
    mean_loss(found, of_all)  # says that parameters are used as DTensors
    found.layers[0].unshard()
    step(of_all).backward()
    for each in (found, want):
        with torch.no_grad():
            for p in each.parameters():
                p.mul_(1.5)
    assert_close(full(step(of_all).detach()), mean_loss(want, tokens).detach())


@world(2)
def test_gradients_that_are_not_reduced_are_refused() -> None:
    model, (tokens, *_) = transformer(replace(ARGS, n_layers=1)), batches(4)
    mesh = Mesh((2,))
    found = sharded(copied(model), mesh)
    found.set_requires_gradient_sync(False)
    step = capture(lambda x: mean_loss(found, x))
    with pytest.raises(CaptureError, match="gradients of fully_shard that are not reduced"):
        step(distribute_tensor(tokens, mesh, [Shard(0)])).backward()
