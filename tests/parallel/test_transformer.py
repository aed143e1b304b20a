"""The toy Transformer cut by its plan: values, gradients, ties, uneven heads, and not one collective too many."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, count_comms
from shardwise import _collectives as collectives
from shardwise._models import ModelArgs, Transformer
from shardwise.parallel import loss_parallel
from shardwise.testing import world
from shardwise.testing.assertions import as_dtensor
from tests.parallel.one_process import full

pytestmark = pytest.mark.slow

EVEN = ModelArgs(dropout_p=0.0)
# Ten heads in five groups on four ranks, eleven words, a width of three ranks' worth.
UNEVEN = ModelArgs(dropout_p=0.0, dim=20, n_heads=10, n_kv_heads=5, vocab_size=11, hidden_dim=7, n_layers=1)
near = partial(assert_close, atol=1e-5, rtol=1e-5)  # scores are float32


def model_of(args: ModelArgs) -> Transformer:
    torch.manual_seed(0)
    return Transformer(args).double()


def tokens_of(args: ModelArgs, count: int = 2) -> Tensor:
    return torch.randint(0, args.vocab_size, (count, 4, 7), generator=torch.Generator().manual_seed(1))


def check(args: ModelArgs, mesh: Mesh, sequence: bool, local_heads: bool, gather: bool) -> dict[str, int]:
    """One step on this rank beside one process; the collectives of forward, backward and reading the gradients."""
    plain, (tokens, targets) = model_of(args), tokens_of(args)
    module = copy.deepcopy(plain)
    Transformer.parallelize(module, mesh, sequence, local_heads, gather_output=gather)
    want = F.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    want.backward()
    here = mesh.coordinate(collectives.rank())
    assert here is not None
    if mesh.ndim > 1:  # this rank's part of an uneven batch
        tokens, targets = (x.split([3, 1])[here[0]] for x in (tokens, targets))
    counts = {}
    with count_comms() as comms:
        scores = module(tokens)
    counts["forward"] = comms.total_calls
    assert (type(scores) is Tensor) == gather
    if gather:
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
    else:
        data = [Shard(0)] * (mesh.ndim - 1)
        with loss_parallel():
            goal = DTensor.from_local(targets.flatten(), mesh, [*data, Replicate()])
            loss = F.cross_entropy(scores.flatten(0, 1), goal, reduction="sum")
        near(as_dtensor(loss).full_tensor(), want)
    with count_comms() as comms:
        loss.backward()
    counts["backward"] = comms.total_calls
    with count_comms() as comms:
        for name, p in module.named_parameters():
            assert isinstance(p, DTensor), name
            assert p.grad is not None
    counts["gradients"] = comms.total_calls
    for p, reference in zip(module.parameters(), plain.parameters(), strict=True):
        assert_close(full(p), reference)
        near(full(p.grad), reference.grad)
    assert (module.output.weight is module.tok_embeddings.weight) == args.weight_tying
    return counts


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_a_step_is_that_of_one_process(ranks: int, sequence: bool) -> None:
    for local_heads, gather in ((False, True), (True, False)):
        world(ranks).run(check, UNEVEN, Mesh((ranks,)), sequence, local_heads, gather)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("gather", [False, True])
def test_on_two_axes_every_rank_passes_its_shard_of_the_batch(sequence: bool, gather: bool) -> None:
    args = ModelArgs(**{**vars(UNEVEN), "checkpoint_activations": True, "weight_tying": False})
    world(4).run(check, args, Mesh((2, 2), names=("dp", "tp")), sequence, gather, gather)


@pytest.mark.parametrize(("ranks", "local_heads", "tied"), [(2, False, True), (4, True, True), (4, False, False)])
def test_collectives_are_those_that_one_would_write_by_hand(ranks: int, local_heads: bool, tied: bool) -> None:
    """Two sums a layer each way, one for the table, one for what scores are made of, and one gather of the scores."""
    args = ModelArgs(**{**vars(EVEN), "weight_tying": tied})
    layers = args.n_layers

    def count(sequence: bool) -> Any:
        (counts,) = {
            tuple(c.items()) for c in world(ranks).run(check, args, Mesh((ranks,)), sequence, local_heads, True)
        }
        return dict(counts)

    assert count(False) == {"forward": 1 + 2 * layers + 1, "backward": 1 + 2 * layers, "gradients": 1}
    # Along the sequence a sum is a gather before and a scatter after; the last layer gathers its input.
    assert count(True) == {"forward": 1 + 4 * layers + 2, "backward": 1 + 4 * layers + 1, "gradients": 1}
