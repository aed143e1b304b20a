"""`plan_tables`, and the plan that it returns: placements, their proof, and their reasons."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise import _collectives as collectives
from shardwise._layout import Mesh, Placement, Placements, checked
from shardwise._pictures.labels import bytes_text, count_text, named_ranks
from shardwise._pictures.page import framed
from shardwise._pictures.report import Report, table_text
from shardwise.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embedding.configs import EmbeddingConfig
from shardwise.embedding.jagged import KeyedJaggedTensor
from shardwise.embedding.optimizers import RowOptimizer
from shardwise.errors import ConfigError, PlanError, did_you_mean
from shardwise.plan.assignment import MEMORY, Assignment, Floats
from shardwise.plan.comparisons import Figure, PlanChange, PlanCheck, check_of, run_steps
from shardwise.plan.fit import fits_text
from shardwise.plan.page import tables_page
from shardwise.plan.search import replacements
from shardwise.plan.step_messages import StepBytes, step_messages
from shardwise.plan.table_costs import COMPUTED, PHASES, BatchShape, speeds
from shardwise.plan.table_options import SHARDINGS
from shardwise.plan.table_plan_file import held_by, read_tables, toml_of_tables
from shardwise.plan.table_problem import Planned, make_plan_of_tables
from shardwise.plan.table_request import Objective, Request, Shardings
from shardwise.simulation.topology import Topology

SHOWN = 40  # tables, the largest; of others the numbers
RANKS_WIDTH = 20  # characters of ranks; of more their number
SENT = [phase for phase in range(len(PHASES)) if phase not in COMPUTED]


class TablePlan(Report, Mapping[str, Placement]):
    """The placement of each table on a mesh of one axis; `shard_embeddings` takes it as its plan.

        plan = plan_tables(collection, Topology.preset("H100"), BatchShape(4096), optimizer=RowWiseAdagrad(lr=0.1))
        sharded = shard_embeddings(collection, plan, plan.mesh, RowWiseAdagrad(lr=0.1))

    Attributes:
        mesh: all ranks.
        gap: the excess of the plan over the bound, as a share of the bound; 0: no plan is better.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        gap: float,
        planned: Planned | None = None,
    ) -> None:
        self._tables, self._placements, self._planned = tuple(tables), dict(placements), planned
        self.mesh, self.gap = mesh, gap

    def __getitem__(self, name: str) -> Placement:
        return self._placements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    @property
    def ranks(self) -> int:
        """The number of ranks of the plan."""
        return self.mesh.size()

    @property
    def _known(self) -> Planned:
        if self._planned is None:
            raise PlanError(
                "A plan that was read from a file has placements only. Fix: plan_tables(…, pinned=plan), for its times."
            )
        return self._planned

    @property
    def milliseconds(self) -> float:
        """The time of the embedding part of a step: forward, backward, and update."""
        planned = self._known
        return 1e3 * (planned.assignment.value + speeds(planned.request.topology)[2])

    @property
    def phases(self) -> dict[str, Floats]:
        """Milliseconds of each phase on each rank, without the link between hosts."""
        planned = self._known
        times = 1e3 * planned.assignment.loads[:, 1:] * planned.in_time.ranks.inside
        return {name: times[:, phase] for phase, name in enumerate(PHASES)}

    @property
    def memory(self) -> Floats:
        """Bytes of tables, optimizer states or gradients, and messages on each rank."""
        found: Floats = self._known.assignment.loads[:, MEMORY]
        return found

    @cached_property
    def _unit_of(self) -> dict[str, tuple[int, int]]:
        """The unit of each table, and its index there."""
        planned = self._known
        return {
            planned.request.names[table]: (unit, number)
            for unit, tables in enumerate(planned.units)
            for number, table in enumerate(tables)
        }

    def sharding(self, name: str) -> str:
        """The name of a table's sharding, such as `column 4`."""
        planned = self._known
        unit, number = self._unit_of[self._checked_name(name)]
        return planned.divisions[unit][planned.assignment.choice[unit]][number].label

    def _checked_name(self, name: str) -> str:
        if name not in self._placements:
            raise PlanError(f"There is no table {name!r}.{did_you_mean(name, self)} Fix: one of {', '.join(self)}.")
        return name

    # ---- reasons ---------------------------------------------------------------------------------------------

    def runner_up(self, name: str) -> PlanChange | None:
        """The next best sharding of a table, if all others stay; None if there is no other."""
        planned = self._known
        unit, number = self._unit_of[self._checked_name(name)]
        best: tuple[float, int, Assignment] | None = None
        for option, found in replacements(planned.in_time, planned.assignment, unit):
            if planned.in_time.ranks.fit(found.loads) and (best is None or found.value < best[0]):
                best = found.value, option, found
        if best is None:
            return None
        return _difference(planned.divisions[unit][best[1]][number].label, planned, planned.assignment, best[2])

    @checked
    def what_if(self, **changes: object) -> tuple[PlanChange, "TablePlan"]:
        """The best plan with other arguments of `plan_tables`, and its difference from this one.

            change, other = plan.what_if(pinned={"users": Shard(0)})

        `pinned` and `counts` are added to those of this plan.
        """
        planned = self._known
        known = set(Request.__dataclass_fields__) - {"tables", "weighted"}
        for name in changes:
            if name not in known:
                raise PlanError(f"what_if: no argument {name!r}. Fix: one of {', '.join(sorted(known))}.")
        given: dict[str, Any] = dict(changes)
        for name in {"pinned", "counts"} & set(given):
            given[name] = {**getattr(planned.request, name), **given[name]}
        other = make_plan_of_tables(replace(planned.request, **given))
        label = ", ".join(f"other {name}" for name in changes)
        return _difference(label, planned, planned.assignment, other.assignment), _plan_of(other)

    def sent_bytes(self, batches: Sequence[KeyedJaggedTensor], steps: int = 1) -> StepBytes:
        """The bytes that each rank sends to others in a step of the sharded collection with these batches: exact.

        Args:
            batches: of each rank.
            steps: number of lookups of the batches; the bytes are those of the last. Earlier messages of ids determine
                their size.

        Raises:
            PlanError: the number of batches is not that of ranks.
            IdError: an id outside its table, as in a step.
        """
        planned = self._known
        if len(batches) != self.ranks:
            raise PlanError(
                f"sent_bytes: {len(batches)} batches, and the plan has {self.ranks} ranks. Fix: the batch of each rank."
            )
        return step_messages(planned.request, self._placements, batches, steps)

    @checked
    def check(self, step: Callable[[], object], batch: KeyedJaggedTensor) -> PlanCheck:
        """The plan beside steps that run: bytes, memory and time. All ranks call it together.

            print(plan.check(lambda: train_step(sharded, batch), batch))

        Args:
            step: looks `batch` up in the sharded collection, which had no lookup before, and calls backward. It runs
                five times.
            batch: of this rank.
        """
        ranks, fullest = self.mesh.sorted_ranks, int(self.memory.argmax())
        own = [batch.keys(), batch.values().tolist(), batch.lengths().tolist(), batch.stride_per_key()]
        batches = [
            KeyedJaggedTensor(keys, torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids)),
                              lengths=torch.tensor(lengths), stride_per_key=strides)
            for keys, ids, lengths, strides in collectives.gather_json(own, ranks)
        ]  # fmt: skip
        predicted = self.sent_bytes(batches, steps=2)
        runs = run_steps(step, self.mesh, fullest)
        planned, sent = dict[str, int](), dict[str, int]()
        for rank, run in zip(ranks, runs, strict=True):
            planned |= {f"{name}, rank {rank}": int(of_ranks[rank]) for name, of_ranks in predicted._asdict().items()}
            of_tables = {cause.partition(" of an embedding collection"): n for cause, n in run.sent.items()}
            sent |= {f"{name}, rank {rank}": n for (name, is_theirs, _), n in of_tables.items() if is_theirs}
        memory = Figure(float(self.memory[fullest]), runs[fullest].memory)
        return check_of(planned, sent, memory, 1e-3 * self.milliseconds, runs)

    # ---- text and files --------------------------------------------------------------------------------------

    def text(self, width: int | None = None, colour: bool = False) -> str:
        """Whether it fits, the memory of ranks, and a table of the largest tables; `save` writes all tables."""
        by_size = sorted(self._tables, key=_size, reverse=True)
        rows = [("table", "rows", "columns", "bytes", "sharding", "ranks")]
        for config in by_size[:SHOWN]:
            label = "" if self._planned is None else self.sharding(config.name)
            held = _ranks_text(self._placements[config.name], self.ranks)
            rows.append((
                config.name, f"{config.num_embeddings:,}", str(config.embedding_dim), bytes_text(_size(config)), label,
                held,
            ))  # fmt: skip
        lines = [*self._heading(), "", table_text(rows, "lrrrll", width)]
        if rest := by_size[SHOWN:]:
            kinds = Counter("" if self._planned is None else self.sharding(c.name).split()[0] for c in rest)
            named = ", ".join(f"{number:,} {kind}".strip() for kind, number in kinds.most_common())
            lines.append(f"and {len(rest):,} more of {bytes_text(sum(map(_size, rest)))}: {named}")
        return "\n".join(lines)

    def _heading(self) -> list[str]:
        if self._planned is None:
            return [f"{count_text(len(self), 'table')} on {count_text(self.ranks, 'rank')}"]
        memory, has = self.memory, self._planned.request.memory
        least, median, most = (bytes_text(float(f(memory))) for f in (np.min, np.median, np.max))
        return [
            fits_text(float(memory.max()), has, self.ranks, self.milliseconds / 1e3, self.gap),
            f"{count_text(len(self), 'table')}; memory of a rank: {least} at least, {median} median, {most} at most",
        ]

    def as_toml(self) -> str:
        """The plan as TOML, which `save` writes and `load` reads: a line for each table, in order."""
        time = None if self._planned is None else self.milliseconds
        return toml_of_tables(self._tables, self._placements, self.mesh, self.gap, time)

    def to_html(self) -> str:
        """The plan as a page that is one file: memory, time and traffic of ranks, and each table with its runner-up."""
        return tables_page(self._heading(), self._known, 1e-3 * self.milliseconds, self.runner_up)

    def _repr_html_(self) -> str | None:
        return None if self._planned is None else framed(self.to_html())

    @checked
    def save(self, path: str | Path) -> None:
        """Write the plan to a TOML file."""
        Path(path).write_text(self.as_toml(), encoding="utf-8")

    @classmethod
    @checked
    def load(cls, path: str | Path, collection: "Tables") -> "TablePlan":
        """Read a plan of the tables of `collection`.

        Raises:
            PlanError: it cannot be read, or has other tables.
        """
        configs = _configs(collection)
        mesh, gap, placements = read_tables(Path(path), configs)
        return cls(configs, placements, mesh, gap)


Tables = EmbeddingBagCollection | EmbeddingCollection | Sequence[EmbeddingConfig]


def _configs(collection: Tables) -> tuple[EmbeddingConfig, ...]:
    if isinstance(collection, EmbeddingBagCollection | EmbeddingCollection):
        return collection._configs
    return tuple(collection)


@checked
def plan_tables(
    collection: Tables,
    topology: Topology,
    batch: BatchShape,
    *,
    optimizer: RowOptimizer | None = None,
    pinned: Mapping[str, Placements] | None = None,
    allowed: Shardings = SHARDINGS,
    groups: Sequence[Sequence[str]] = (),
    counts: Mapping[str, Tensor] | None = None,
    head_room: float = 0.1,
    objective: Objective = "time",
    forward_dtype: torch.dtype = torch.float32,
    backward_dtype: torch.dtype = torch.float32,
) -> TablePlan:
    """The placement of each table that minimizes the time of the slowest rank within the memory of ranks.

        plan = plan_tables(collection, Topology.preset("A100", hosts=2), BatchShape(4096, {"users": 1, "items": 20}))

    Args:
        collection: a collection, or the configs of its tables.
        topology: the machine.
        batch: how many ids a batch has.
        optimizer: as for `shard_embeddings`; None: tables have dense gradients, for an optimizer of `torch.optim`,
            whose states are not counted.
        pinned: given placements, on a mesh of one axis of all ranks; a TablePlan is one.
        allowed: shardings that tables may have: table, column, row, table_row, table_column, grid, replicated; for all,
            or by table.
        groups: tables that have one sharding on the same ranks.
        counts: how often each row is looked up (`count_rows`); row-wise shards then have equal loads.
        head_room: the share of memory that stays free of tables.
        objective: "time" of a step; or first "memory" of the fullest rank, or "bytes" of the busiest one.
        forward_dtype, backward_dtype: as for `shard_embeddings`.

    Raises:
        ConfigError: scipy is missing, or numbers that no batch has.
        TooLargeError: the tables do not fit; the text says how much is missing and the smallest change that fits.
        PlanError: arguments that name no table, or pinned placements that do not fit.
    """
    configs = _configs(collection)
    if not configs:
        raise ConfigError("plan_tables: there is no table. Fix: a collection, or the configs of its tables.")
    weighted, given = isinstance(collection, EmbeddingBagCollection) and collection.is_weighted(), dict(pinned or {})
    request = Request(
        configs, weighted, topology, batch, optimizer, given, allowed, groups, counts or {}, head_room, objective,
        forward_dtype, backward_dtype,
    )  # fmt: skip
    return _plan_of(make_plan_of_tables(request))


def _plan_of(planned: Planned) -> TablePlan:
    gap = max(0.0, planned.value / planned.bound - 1) if planned.bound > 0 else 0.0
    topology = planned.request.topology
    mesh = Mesh((topology.ranks,), device_type=topology.device_type)
    return TablePlan(planned.request.tables, planned.placements(), mesh, gap, planned)


def _difference(label: str, planned: Planned, old: Assignment, new: Assignment) -> PlanChange:
    def numbers(one: Assignment) -> tuple[float, float, float]:
        sent = one.loads[:, 1:][:, SENT].sum(1).max()
        return 1e3 * one.value, float(sent), float(one.loads[:, MEMORY].max())

    time, sent, memory = (b - a for a, b in zip(numbers(old), numbers(new), strict=True))
    return PlanChange(label, time, round(sent), round(memory))


def _size(config: EmbeddingConfig) -> int:
    return config.num_embeddings * config.embedding_dim * config.data_type.itemsize


def _ranks_text(placement: Placement, ranks: int) -> str:
    held = held_by(placement)
    return (
        f"all {ranks}" if held is None or len(held) == ranks else named_ranks(held, RANKS_WIDTH).removeprefix("rank ")
    )
