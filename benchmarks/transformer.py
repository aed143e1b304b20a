"""A tensor-parallel Transformer: plain torch, a step by hand, shardwise, torch.distributed.tensor.parallel.

On one rank: what each adds to the plain module. On several: training steps beside one written by hand, which sends the
least there is to send, and the collectives of one step, counted. All systems live in the same processes, start from the
same parameters, see the same tokens, take turns, and must agree on the loss before anything is timed.

    python benchmarks/transformer.py [--quick]
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from by_hand import ByHand
from measure import Times, interleaved, machine, print_table, ratio
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn

from shardwise import capture, count_comms, init_device_mesh
from shardwise._models import ModelArgs, Transformer
from shardwise.collectives import init_processes

VOCABULARY = 256
SECONDS_EACH = 2.0  # for each line of a table of steps; on a slow machine there are fewer rounds, but at least three
OPTIMISERS = ("foreach", "fused")
NAMES = {ranks: ["plain" if ranks == 1 else "by hand", "ours", "captured", "torch"] for ranks in (1, 2, 4)}


@dataclass(frozen=True)
class Sizes:
    """One measured setting; everything follows from it."""

    ranks: int
    layers: int
    dim: int
    heads: int
    batch: int
    tokens: int
    sequence: bool  # sequence parallel: between layers, each rank has a part of the sequence

    def __str__(self) -> str:
        return f"{self.layers} layers, dim {self.dim}{', sequence parallel' if self.sequence else ''}"

    def model(self) -> Transformer:
        torch.manual_seed(0)
        sizes = {"n_layers": self.layers, "dim": self.dim, "n_heads": self.heads}
        return Transformer(ModelArgs(**sizes, vocab_size=VOCABULARY, max_seq_len=self.tokens, dropout_p=0.0))

    def data(self) -> tuple[Tensor, Tensor]:
        """Tokens, and those that follow them."""
        drawn = torch.randint(VOCABULARY, (self.batch, self.tokens + 1), generator=torch.Generator().manual_seed(1))
        return drawn[:, :-1], drawn[:, 1:].reshape(-1)


def one_rank() -> list[Sizes]:
    return [Sizes(1, layers, dim, 4, 8, 16, s) for (layers, dim), s in product([(2, 16), (4, 64)], [False, True])]


def several_ranks(ranks: int) -> list[Sizes]:
    small = [Sizes(ranks, layers, dim, 4, 4, 32, s) for (layers, dim), s in product([(2, 64), (4, 128)], [False, True])]
    large = [Sizes(ranks, 2, dim, 8, 2, 64, s) for dim, s in product([512, 1024], [False, True])]
    return small + large


# ---- the systems --------------------------------------------------------------------------------------------


class System:
    """One way to compute the loss and its gradients."""

    def __init__(self, model: nn.Module, sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        self.params = list(model.parameters())
        self.optimiser: torch.optim.Optimizer | None = None

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), targets)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, a look at every gradient."""
        loss = self.loss(tokens, targets)
        loss.backward()
        for p in self.params:
            assert p.grad is not None
        return loss

    def clear(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.gradients(tokens, targets)
        assert self.optimiser is not None
        self.optimiser.step()
        self.clear()
        return loss

    def optimise(self, how: str) -> None:
        self.optimiser = torch.optim.Adam(self.params, lr=1e-4, **{how: True})

    def collectives(self, tokens: Tensor, targets: Tensor) -> dict[str, int]:
        """Those of a training step."""
        return {}


class Hand(System):
    """Megatron's way, by hand."""

    def __init__(self, model: Transformer, sizes: Sizes) -> None:
        self.by_hand = ByHand(model, sizes.sequence)
        super().__init__(self.by_hand, sizes)

    def gradients(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.by_hand.reduce_gradients()
        return loss

    def collectives(self, tokens: Tensor, targets: Tensor) -> dict[str, int]:
        self.by_hand.sender.counts.clear()
        self.step(tokens, targets)
        return dict(self.by_hand.sender.counts)


class Ours(System):
    """shardwise, by the plan that comes with its model."""

    def __init__(self, model: Transformer, sizes: Sizes) -> None:
        mesh = init_device_mesh("cpu", (sizes.ranks,))
        super().__init__(Transformer.parallelize(model, mesh, sizes.sequence), sizes)

    def collectives(self, tokens: Tensor, targets: Tensor) -> dict[str, int]:
        with count_comms() as comms:
            self.step(tokens, targets)
        return dict(comms.calls)


class Captured(Ours):
    """shardwise, replaying a captured step: forward and backward without its Python work."""

    def __init__(self, model: Transformer, sizes: Sizes) -> None:
        super().__init__(model, sizes)
        self.replay = capture(super().loss)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.replay(tokens, targets)  # type: ignore[no-any-return]


class Peer(System):
    """torch.distributed.tensor.parallel, by the plan of torch's own toy Transformer.

    Attention works on plain tensors, this rank's heads: torch has no rule for the fused kernel of CPUs.
    """

    def __init__(self, model: Transformer, sizes: Sizes) -> None:
        mesh = init_device_mesh("cpu", (sizes.ranks,))
        tp.parallelize_module(model, mesh, peer_plan(sizes))
        if model.model_args.weight_tying:
            model.output.weight = model.tok_embeddings.weight
        super().__init__(model, sizes)

    def optimise(self, how: str) -> None:
        # In one group, torch's Adam refuses plain and distributed parameters together.
        kinds = [[p for p in self.params if isinstance(p, peer.DTensor) == is_cut] for is_cut in (True, False)]
        self.optimiser = torch.optim.Adam([{"params": k} for k in kinds if k], lr=1e-4, **{how: True})

    def collectives(self, tokens: Tensor, targets: Tensor) -> dict[str, int]:
        with CommDebugMode() as mode:
            self.step(tokens, targets)
        return {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()}


def peer_plan(sizes: Sizes) -> dict[str, tp.ParallelStyle]:
    """That of `torch.testing._internal.distributed._tensor.common_dtensor`."""
    replicated, places = peer.Replicate(), peer.Shard(1)
    between = places if sizes.sequence else replicated
    plan: dict[str, tp.ParallelStyle] = {
        "tok_embeddings": tp.RowwiseParallel(input_layouts=replicated, output_layouts=between),
        "pos_embeddings": tp.RowwiseParallel(
            input_layouts=replicated, output_layouts=peer.Shard(0) if sizes.sequence else replicated
        ),
        "layers.*.attention.w[qkv]": tp.ColwiseParallel(),
        "layers.*.attention.wo": tp.RowwiseParallel(output_layouts=between),
        "layers.*.feed_forward.w1": tp.ColwiseParallel(input_layouts=between),
        "layers.*.feed_forward.w2": tp.RowwiseParallel(output_layouts=between),
        "output": tp.ColwiseParallel(input_layouts=between, output_layouts=replicated),
    }
    if sizes.sequence:
        plan |= dict.fromkeys(("norm", "layers.*.attention_norm", "layers.*.ffn_norm"), tp.SequenceParallel())
        plan["layers.*.attention"] = tp.PrepareModuleInput(input_layouts=(places,), desired_input_layouts=(replicated,))
    return plan


def systems(sizes: Sizes) -> dict[str, System]:
    """Each with a copy of the same model; on one rank, the plain one takes the place of that by hand."""
    model = sizes.model()
    first = System(deepcopy(model), sizes) if sizes.ranks == 1 else Hand(deepcopy(model), sizes)
    others = [kind(deepcopy(model), sizes) for kind in (Ours, Captured, Peer)]
    return dict(zip(NAMES[sizes.ranks], [first, *others], strict=True))


# ---- one measured run -----------------------------------------------------------------------------------------


def check_losses(living: dict[str, System], sizes: Sizes) -> None:
    """All systems must find the loss of the plain model, over three steps of Adam."""
    reference = System(sizes.model(), sizes)
    for how, (name, system) in product(OPTIMISERS, {"plain": reference, **living}.items()):
        system.optimise(how)
        losses = torch.tensor([system.step(*sizes.data()).item() for _ in range(3)])
        if name == "plain":
            expected = losses
        assert torch.allclose(losses, expected, rtol=1e-5, atol=1e-5), f"{sizes}: {name} finds {losses}, not {expected}"


def timed(runs: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, Times]:
    """Interleaved, and of each round the time of the slowest rank."""
    times = interleaved(runs, rounds, calls, warmup=2)
    for name, own in times.items():
        slowest = torch.tensor(own.rounds, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[name] = Times(tuple(slowest.tolist()))
    return times


def bound(act: Callable[..., object], sizes: Sizes) -> Callable[[], object]:
    data = sizes.data()
    return lambda: act(*data)


def gradients_of(system: System) -> Callable[..., None]:
    def run(tokens: Tensor, targets: Tensor) -> None:
        system.gradients(tokens, targets)
        system.clear()

    return run


@dataclass
class Report:
    """Rows of the tables, as they come."""

    overheads: list[list[str]]
    steps: list[list[str]]
    counts: list[list[str]]


def measure(sizes: Sizes, rounds: int, report: Report) -> None:
    living = systems(sizes)
    check_losses(living, sizes)
    if sizes.ranks == 1:
        times = timed({n: bound(gradients_of(s), sizes) for n, s in living.items()}, rounds, 5)
        report.overheads.append([str(sizes), *overhead_figures(times)])
        return
    report.counts.append([str(sizes), *(counted(living[name], sizes) for name in ("by hand", "ours", "torch"))])
    calls = 3 if sizes.dim < 512 else 1
    for how in OPTIMISERS:
        for system in living.values():
            system.optimise(how)
        runs = {n: bound(s.step, sizes) for n, s in living.items()}
        one_round = sum(t.best for t in timed(runs, 1, calls).values()) * calls
        times = timed(runs, min(rounds, max(3, int(SECONDS_EACH / one_round))), calls)
        report.steps.append([f"{sizes}; Adam {how}", *step_figures(times)])


def counted(system: System, sizes: Sizes) -> str:
    found = system.collectives(*sizes.data())
    return f"{sum(found.values())} = " + " + ".join(f"{n} {name}" for name, n in sorted(found.items()))


def overhead_figures(times: dict[str, Times]) -> list[str]:
    plain, mine, replayed, theirs = times.values()
    return [
        *(f"{t.best * 1e3:.2f}" for t in times.values()),
        *(f"{(t.best - plain.best) * 1e3:.2f}" for t in (mine, theirs)),
        ratio(mine.best - plain.best, theirs.best - plain.best),
        ratio(mine.median - plain.median, theirs.median - plain.median),
        f"{of_turns(replayed, plain):.3f}x",
    ]


def step_figures(times: dict[str, Times]) -> list[str]:
    hand, mine, replayed, theirs = times.values()
    return [
        *(f"{t.best * 1e3:.1f}" for t in times.values()),
        ratio(theirs.best, mine.best),
        *(f"{x:.2f}x" for x in (of_turns(theirs, mine), of_turns(mine, hand), of_turns(replayed, hand))),
    ]


def of_turns(a: Times, b: Times) -> float:
    """How many times as long `a` took as `b`: the median over the rounds, in each of which both had a turn."""
    return median(x / y for x, y in zip(a.rounds, b.rounds, strict=True))


def rank_main(rank: int, settings: list[Sizes], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of the peer
    ranks = settings[0].ranks
    init_processes(rank, ranks, str(Path(folder) / "store"), timeout_seconds=120)
    report = Report([], [], [])
    for sizes in settings:
        measure(sizes, rounds, report)
    if rank == 0:
        print_report(settings[0], report)
    dist.barrier()
    dist.destroy_process_group()


def print_report(sizes: Sizes, report: Report) -> None:
    if report.overheads:
        print_table(
            f"One rank: forward, backward, a look at every gradient, {sizes.batch} x {sizes.tokens} tokens; ms, best "
            "of the rounds\nover plain = variant - plain; ratio = ours over plain / torch over plain",
            [
                "model",
                *NAMES[1],
                "ours over plain",
                "torch over plain",
                "ratio",
                "ratio of medians",
                "captured / plain",
            ],
            report.overheads,
        )
        return
    print_table(
        f"{sizes.ranks} gloo ranks: a training step with Adam; ms, of the slowest rank, best of the rounds\n"
        "the last three columns are medians over rounds, in each of which every system has its turn",
        [
            "model",
            *NAMES[sizes.ranks],
            "torch / ours, best",
            "torch / ours",
            "ours / by hand",
            "captured / by hand",
        ],
        report.steps,
    )
    print_table(
        f"{sizes.ranks} gloo ranks: collectives of a training step, counted",
        ["model", "by hand", "ours", "torch"],
        report.counts,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds and the smaller sizes: shows that it runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=[1, 2, 4])
    parser.add_argument("--only", default="", help="only settings whose name contains this, such as 'dim 64'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for ranks in options.ranks:
        settings = [s for s in (one_rank() if ranks == 1 else several_ranks(ranks)) if options.only in str(s)]
        if options.quick:
            settings = [s for s in settings if s.dim < 128]
        if settings:
            rounds = 4 if options.quick else 12 if ranks == 1 else 8
            with tempfile.TemporaryDirectory() as folder:
                spawn(rank_main, args=(settings, rounds, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
