"""Cases of sharded collections, each compared with one process: results, gradients, tables and states of every step."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import _collectives as collectives
from shardwise._collectives import count_comms
from shardwise._layout import Box, Boxes, Layout, Mesh, Placements, Shard, as_placements
from shardwise.embedding import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedTensor,
    shard_embeddings,
)
from shardwise.embedding.kernels import Kernels
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import IdError
from shardwise.testing import world
from tests.embedding.one_process import OneProcess, RankBatch, jagged, output_names, valid


@dataclass(frozen=True)
class Case:
    """A collection, how it is sharded and trained, and its batches.

    Attributes:
        batches: of each step, for each rank.
        optimizers: of each table; None: dense gradients, and SGD with a learning rate of 1/64.
        signed: whether gradients may be negative.
        kernels: of the ranks.
        exact: whether all sums and steps are exact in float32.
        halving: whether a scheduler halves the learning rates of `optimizers` after every second step.
        calls: the collectives of every step but the first; None: any.
        resizes: before a step: rows and new placements, by table.
    """

    configs: Sequence[EmbeddingConfig]
    pooled: bool
    weighted: bool
    mesh: Mesh
    plan: Mapping[str, Placements]
    optimizers: Mapping[str, RowOptimizer] | None
    batches: Sequence[Sequence[RankBatch]]
    signed: bool = True
    kernels: Kernels = field(default_factory=Kernels)
    exact: bool = False
    halving: bool = False
    calls: int | None = None
    resizes: Mapping[int, tuple[Mapping[str, int], Mapping[str, Placements]]] = field(default_factory=dict)

    def layout_of(self, config: EmbeddingConfig) -> Layout:
        placements = as_placements(self.mesh, self.plan.get(config.name))
        return Layout(self.mesh, placements, (config.num_embeddings, config.embedding_dim))

    def resized(self, step: int) -> "Case":
        """The case with the tables and the plan from this step on."""
        sizes, plan = self.resizes.get(step, ({}, {}))
        configs = [replace(c, num_embeddings=sizes.get(c.name, c.num_embeddings)) for c in self.configs]
        return replace(self, configs=configs, plan={**self.plan, **plan})

    def blocks(self) -> dict[str, list[Box]]:
        """The distinct boxes of each table."""
        return {
            config.name: list(dict.fromkeys(b for r in self.mesh.ranks for b in layout.boxes(r) if b.numel))
            for config, layout in ((config, self.layout_of(config)) for config in self.configs)
        }

    def gradient_of(self, step: int, rank: int, name: str, like: Tensor) -> Tensor:
        """Multiples of 1/64, which 16 bits hold exactly, as well as their sums."""
        seed = sum(ord(letter) * 31**at for at, letter in enumerate(name))
        generator = torch.Generator().manual_seed(seed + 1009 * step + rank)
        low = -8 if self.signed else 1
        return torch.randint(low, 9, like.shape, generator=generator).to(like.dtype) / 64

    def values(self) -> dict[str, Tensor]:
        """Of the tables: quarters."""
        generator = torch.Generator().manual_seed(0)
        return {
            c.name: torch.randint(-8, 9, (c.num_embeddings, c.embedding_dim), generator=generator).to(c.data_type) / 4
            for c in self.configs
        }

    def collection(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """In one process, with these values."""
        made: Any = (
            EmbeddingBagCollection(self.configs, self.weighted)  # type: ignore[arg-type]
            if self.pooled
            else EmbeddingCollection(self.configs)
        )
        kind = "embedding_bags" if self.pooled else "embeddings"
        made.load_state_dict({f"{kind}.{name}.weight": value for name, value in self.values().items()})
        return made  # type: ignore[no-any-return]


@dataclass
class Expected:
    """Of one step: the results of each rank, or the error of all, and tables, gradients and states after it."""

    error: str
    results: list[dict[str, Tensor]]
    tables: dict[str, Tensor]
    gradients: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def first_bad_id(case: Case, batches: Sequence[RankBatch]) -> str:
    """What the error of the first id says that is an error; empty: there is none."""
    for config, feature, _ in output_names(case.configs):
        of_ranks = zip(sorted(case.mesh.ranks), (batch[feature].split() for batch in batches), strict=True)
        bad = [
            (sample, position, rank, number)
            for rank, bags in of_ranks
            for sample, bag in enumerate(bags)
            for position, number in enumerate(bag)
            if config.bad_ids == "error" and not 0 <= number < config.num_embeddings
        ]
        for sample, position, rank, number in sorted(bad)[:1]:
            where = f"at position {position} of sample {sample} of rank {rank}"
            return f"Table {config.name}, feature {feature}: id {number} {where} is not in the table"
    return ""


def one_process(case: Case) -> list[Expected]:
    """What every step is expected to give."""
    plain = OneProcess(case.configs, case.pooled, case.weighted, case.values(), case.optimizers, case.blocks())
    found = []
    for step, batches in enumerate(case.batches):
        if step in case.resizes:
            case = case.resized(step)
            plain.resize(case.configs, case.blocks())
        error = first_bad_id(case, batches)
        results: list[dict[str, Tensor]] = []
        if not error:
            lr = 0.5 ** (step // 2) if case.halving else 1.0
            gradient_of = partial(case.gradient_of, step)
            results = plain.step(batches, gradient_of, lr)
        tables = plain.tables
        gradients = {}
        if case.optimizers is None and not error:
            gradients = {name: table.weight.grad.clone() for name, table in tables.items()}  # type: ignore[union-attr]
            for name, table in tables.items():
                table.weight.data = (table.weight.data - gradients[name] / 64).to(table.config.data_type).double()
        found.append(
            Expected(
                error,
                results,
                {name: table.weight.detach().clone() for name, table in tables.items()},
                gradients,
                {name: {k: v.clone() for k, v in table.expected_states().items()} for name, table in tables.items()},
            )
        )
    return found


def close(
    case: Case, got: Tensor, want: Tensor, what: str, dtype: torch.dtype = torch.float32, roundings: float = 8
) -> None:
    """Compare with float64; a number of 16 bits was rounded up to `roundings` times, by half an eps each."""
    tolerance = 0.0 if case.exact else 1e-5 if dtype == torch.float32 else roundings / 2 * torch.finfo(dtype).eps
    scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
    if got.shape == want.shape and bool(((got.double() - want).abs() <= tolerance * scale).all()):
        return  # a fraction of the time of what says where they differ
    assert_close(got.double(), want, rtol=tolerance, atol=tolerance * scale, msg=lambda text: f"{what}: {text}")


def steps_of_a_rank(case: Case, expected: Sequence[Expected]) -> None:
    """The same steps on a rank of a sharded collection."""
    optimizers = None if case.optimizers is None else dict(case.optimizers)
    module = shard_embeddings(case.collection(), case.plan, case.mesh, optimizers, kernels=case.kernels)
    scheduler = torch.optim.lr_scheduler.StepLR(module.fused_optimizer, 2, 0.5) if case.halving else None  # type: ignore[arg-type]
    me, parameters = sorted(case.mesh.ranks).index(collectives.rank()), list(module.parameters())
    for step, (batches, want) in enumerate(zip(case.batches, expected, strict=True)):
        if step in case.resizes:
            module.resize_(*case.resizes[step])
            case = case.resized(step)
        batch, where = jagged(batches[me], case.weighted), f"step {step}, rank {me}"
        if want.error:
            with pytest.raises(IdError, match=re.escape(want.error)):
                module(batch)
        else:
            with count_comms() if case.calls is not None and step else nullcontext() as comms:
                one_step(case, module, batch, step, me, want)
            assert comms is None or comms.total_calls == case.calls, where
            compare_gradients(case, module, want, where)
        if scheduler is not None:
            module.fused_optimizer.step()  # type: ignore[union-attr]
            scheduler.step()
        if want.error or want is expected[-1]:
            compare_tables(case, module, want, where)
        for parameter in module.parameters():
            parameter.grad = None
    assert [id(p) for p in module.parameters()] == [id(p) for p in parameters]


def one_step(case: Case, module: Any, batch: Any, step: int, me: int, want: Expected) -> None:
    """Forward and backward."""
    out = module(batch)
    names = [name for _, _, name in output_names(case.configs)]
    assert list(out.keys()) == names
    if isinstance(out, KeyedTensor):
        results = {name: out[name] for name in names}
    else:
        results = {name: out[name].values() for name in names}
        for _, feature, name in output_names(case.configs):
            assert out[name].lengths().tolist() == case.batches[step][me][feature].lengths.tolist()
    loss = torch.zeros(())
    for config, _, name in output_names(case.configs):
        close(case, results[name], want.results[me][name], f"step {step}, rank {me}, result {name}", config.data_type)
        loss = loss + (results[name] * case.gradient_of(step, me, name, results[name])).sum()
    loss.backward()


def compare_gradients(case: Case, module: Any, want: Expected, where: str) -> None:
    """Of tables without an optimizer, which are then trained."""
    if case.optimizers is not None:
        return
    for name, gradient in want.gradients.items():
        parameter = parameter_of(case, module, name)
        close(case, parameter.grad.full_tensor(), gradient, f"{where}, gradient {name}", parameter.dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= parameter.grad / 64


def parameter_of(case: Case, module: Any, name: str) -> Any:
    return module.get_parameter(f"{'embedding_bags' if case.pooled else 'embeddings'}.{name}.weight")


def compare_tables(case: Case, module: Any, want: Expected, where: str) -> None:
    """Also the states, if they have a layout."""
    for config in case.configs:
        got = parameter_of(case, module, config.name).full_tensor()
        close(case, got, want.tables[config.name], f"{where}, table {config.name}", config.data_type)
    if module.fused_optimizer is None or not saves_states(case):
        return
    saved = module.fused_optimizer.state_dict()
    names = [name.split(".")[1] for group in saved["param_groups"] for name in group["param_names"]]
    for number, name in enumerate(names):
        states = saved["state"].get(number, {})
        assert states.keys() == want.states[name].keys()
        for key, value in states.items():
            close(case, value.full_tensor(), want.states[name][key], f"{where}, table {name}, state {key}")


def saves_states(case: Case) -> bool:
    """Row-wise states of columns on several mesh axes, or in boxes, have no layout."""
    return not any(
        any(isinstance(p, Boxes) for p in placements)
        or sum(isinstance(p, Shard) and p.dim == 1 for p in placements) > 1
        for placements in (case.layout_of(config).placements for config in case.configs)
    )


def check_plain(case: Case) -> None:
    """The plain collection gives what one process gives the first rank: results and gradients, or the error."""
    batch = case.batches[0][0]
    alone = replace(case, mesh=Mesh((1,)), plan={}, optimizers=None, batches=[[batch]], resizes={}, halving=False)
    (want,), module, features = one_process(alone), alone.collection(), jagged(batch, case.weighted)
    if want.error:
        with pytest.raises(IdError, match=re.escape(want.error.replace(" of rank 0", ""))):
            module(features)
        return
    one_step(alone, module, features, 0, 0, want)
    for config in case.configs:
        parameter, gradient = parameter_of(alone, module, config.name), want.gradients[config.name]
        roundings = 8 + largest_number_of_uses(config, batch)  # torch rounds after each addition
        close(alone, parameter.grad, gradient, f"plain gradient {config.name}", parameter.dtype, roundings)


def largest_number_of_uses(config: EmbeddingConfig, batch: RankBatch) -> int:
    """How often a batch looks up the row that it looks up most often."""
    uses = Counter(valid(config, number) for name in config.feature_names for number in batch[name].ids.tolist())
    return max((count for row, count in uses.items() if row is not None), default=0)


def check(case: Case, name: str = "", real: bool = False) -> None:
    """Every step of every rank equals one process, as does the first step of the plain collection."""
    try:
        check_plain(case)
        world(case.mesh.size(), real=real).run(steps_of_a_rank, case, one_process(case))
    except BaseException as error:
        error.add_note(name)
        raise
