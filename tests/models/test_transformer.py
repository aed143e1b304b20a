"""Training the toy Transformer on 1 to 4 ranks is training it in one process, whatever is switched on.

Three ranks share four heads unevenly, and no number of ranks above one divides the seven tokens of a sequence.
"""

from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DTensor, Mesh, rank
from shardwise._models import ModelArgs, Transformer
from shardwise.errors import ConfigError
from shardwise.testing import world
from tests.parallel.one_process import full

pytestmark = pytest.mark.slow

STEPS = 5
near = partial(assert_close, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class Switches:
    """What is switched on; dropout of one element in ten."""

    sequence: bool
    tied: bool
    checkpointed: bool
    dropout: bool
    fused: bool
    clipped: bool

    def __str__(self) -> str:
        return "+".join(name for name, on in vars(self).items() if on) or "nothing"

    @property
    def args(self) -> ModelArgs:
        return ModelArgs(
            weight_tying=self.tied, checkpoint_activations=self.checkpointed, dropout_p=0.1 if self.dropout else 0.0
        )


@dataclass
class Training:
    """Whole tensors, step by step, and all parameters at the end."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(switches: Switches, mesh: Mesh | None) -> Training:
    """Five steps of Adam on five batches; without a mesh no DTensor is anywhere."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(switches.args)
    data = torch.randint(0, 8, (STEPS, 2, 3, 7))
    if mesh is not None:
        Transformer.parallelize(model, mesh, switches.sequence)  # type: ignore[arg-type]
        assert all(isinstance(p, DTensor) for p in model.parameters())
    # With torch's eps the rounding of a gradient that is nearly zero decides the direction of a full step.
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-4, foreach=not switches.fused, fused=switches.fused)
    found = Training()
    for batch in data:
        optimizer.zero_grad()
        tokens, targets = (leaf_copy(x, mesh) for x in batch)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum") / batch[1].numel()
        loss.backward()
        found.losses.append(full(loss).detach())
        found.gradients.append({name: full(p.grad).clone() for name, p in named(model) if p.grad is not None})
        if switches.clipped:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25, foreach=not switches.fused)
            found.norms.append(full(norm))
        optimizer.step()
    found.parameters = {name: full(p).detach() for name, p in named(model)}
    return found


def leaf_copy(x: Tensor, mesh: Mesh | None) -> Tensor:
    """On a grid the first axis is of data: two examples for one row of ranks, one for the other."""
    if mesh is None or mesh.ndim == 1:
        return x
    here = mesh.coordinate(rank())
    assert here is not None
    first, second = x[:2], x[2:]
    return second if here[0] else first


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters(remove_duplicate=False))


@cache
def one_process(switches: Switches) -> Training:
    """Plain torch; with dropout, whose stream is not torch's, the same model on one rank, uncut."""
    if switches.dropout:
        (found,) = world(1).run(train, switches, Mesh((1,)))
        return found
    return train(switches, None)


def check(switches: Switches, mesh: Mesh, real: bool = False) -> None:
    expected = one_process(replace(switches, sequence=False))
    found = world(mesh.size(), real=real).run(train, switches, mesh)
    for ours in found:
        near(ours.norms, expected.norms)
        assert [list(g) for g in ours.gradients] == [list(g) for g in expected.gradients]
        for step, gradients in enumerate(ours.gradients):
            for name, gradient in gradients.items():
                near(gradient, expected.gradients[step][name], msg=f"gradient of {name} in step {step}: {{}}".format)
        for name, parameter in ours.parameters.items():
            near(parameter, expected.parameters[name], msg=f"{name}: {{}}".format)
    columns = mesh.shape[-1]
    for column in range(columns):  # down which the losses of the parts of the batch add up
        parts = [ours.losses for ours in found[column::columns]]
        near([sum(of_step) for of_step in zip(*parts, strict=True)], expected.losses)


# Columns with three of rows 1 to 5 switched on: any two of them meet in all four ways.
ON = list(combinations(range(1, 6), 3))[:6]
COVERING = [Switches(*(row in column for column in ON)) for row in range(6)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("switches", COVERING, ids=str)
def test_losses_gradients_and_steps_are_those_of_one_process(switches: Switches, ranks: int) -> None:
    check(switches, Mesh((ranks,)))


EVERYTHING = replace(COVERING[1], **dict.fromkeys(vars(COVERING[1]), True))


@pytest.mark.parametrize("switches", [EVERYTHING, replace(EVERYTHING, sequence=False, checkpointed=False)], ids=str)
def test_on_two_axes_the_shards_of_an_uneven_batch_train_one_model(switches: Switches) -> None:
    check(switches, Mesh((2, 2), names=("dp", "tp")))


def test_on_processes_everything_at_once_is_one_process_too() -> None:
    check(EVERYTHING, Mesh((2,)), real=True)


def test_unsupported_options_of_parallelize_raise() -> None:
    with pytest.raises(ConfigError, match="Plain heads drop the same weights on every rank"):
        Transformer.parallelize(Transformer(ModelArgs()), Mesh((1,)), False, local_output_for_attn=True)
    with pytest.raises(ConfigError, match="got Linear"):
        Transformer.parallelize(nn.Linear(2, 2), Mesh((1,)), False)  # type: ignore[arg-type]


def test_clipping_clips_and_dropout_drops() -> None:
    nothing, everything = COVERING[0], replace(COVERING[0], dropout=True, clipped=True)
    assert all(norm > 0.25 for norm in one_process(everything).norms)
    assert not torch.equal(one_process(nothing).losses[0], one_process(everything).losses[0])
