"""The transformer of `plan_steps.py`: plans by hand on meshes of all shapes; predicted and measured steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from step_measure import Measured, Predicted, measure_steps, report
from torch import Tensor, nn

from shardwise import Mesh, Replicate, launch
from shardwise._models import ModelArgs, Transformer
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from shardwise.plan import ModulePlan, Topology, plan_module, price_module

Styles = Mapping[str, ParallelStyle]
SIZES = ModelArgs(n_layers=4, dim=512, n_heads=8, vocab_size=1024, max_seq_len=256, dropout_p=0.0)
SMALL = ModelArgs(n_layers=1, dim=32, n_heads=4, vocab_size=32, max_seq_len=16, dropout_p=0.0)
BATCH = 8

COLUMN, ROW, GATHERED = ColwiseParallel(use_local_output=False), RowwiseParallel(), ColwiseParallel(
    output_layouts=Replicate()
)  # fmt: skip
LOCAL_ROW = RowwiseParallel(input_layouts=Replicate())
PERCEPTRON: Styles = {"layers.*.feed_forward.w1": COLUMN, "layers.*.feed_forward.w2": ROW}
ATTENTION: Styles = {"layers.*.attention.w[qkv]": COLUMN, "layers.*.attention.wo": ROW}
VOCABULARY: Styles = {"tok_embeddings": LOCAL_ROW, "output": GATHERED}
TENSOR: Mapping[str, Styles] = {
    "all": {**ATTENTION, **PERCEPTRON, **VOCABULARY},
    "layers": {**ATTENTION, **PERCEPTRON},
    "attention": ATTENTION,
    "perceptron": PERCEPTRON,
    "vocabulary": VOCABULARY,
    "gathered columns": {"layers.*.feed_forward.w[12]": GATHERED, "layers.*.attention.w[qkvo]": GATHERED},
    "rows": {"layers.*.feed_forward.w[12]": LOCAL_ROW, "layers.*.attention.wo": LOCAL_ROW},
    "nothing": {},
}


def by_hand(ranks: int, layers: int) -> Iterator[tuple[str, ModulePlan]]:
    each_layer = (*(f"layers.{i}" for i in range(layers)), "")
    for data in [n for n in range(1, ranks + 1) if ranks % n == 0]:
        mesh = Mesh((data, ranks // data), names=("dp", "tp"))
        for name, styles in TENSOR.items() if data < ranks else [("", {})]:
            if data == 1:
                yield f"1 x {ranks} {name}", ModulePlan(mesh, styles)
                continue
            yield f"{data} x {ranks // data} {name}, layers", ModulePlan(mesh, styles, each_layer)
            if data == ranks:
                yield f"{data} x 1, kept", ModulePlan(mesh, styles, each_layer, reshard=False)
                yield f"{data} x 1, one unit", ModulePlan(mesh, styles, ("",))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def batch_of(sizes: ModelArgs) -> Sequence[Tensor]:
    g = torch.Generator().manual_seed(0)
    return list(torch.randint(sizes.vocab_size, (2, BATCH, sizes.max_seq_len), generator=g))


def run(sizes: ModelArgs, plans: Sequence[ModulePlan], rounds: int) -> list[Measured]:
    """Runs on ranks."""
    torch.set_num_threads(1)

    def step_of(plan: ModulePlan) -> Callable[[], object]:
        torch.manual_seed(0)
        model, data = plan.apply(Transformer(sizes)), plan.mesh.shape[0]
        part = dist.get_rank() // (plan.mesh.size() // data)
        batch = [x.chunk(data)[part] for x in batch_of(sizes)]
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()

        return step

    return measure_steps([step_of(plan) for plan in plans], rounds)


def modules(topology: Topology, count: int, rounds: int, quick: bool) -> None:
    """Predicted and measured steps of up to `count` plans."""
    sizes, ranks = SMALL if quick else SIZES, topology.ranks
    model, batch = Transformer(sizes), batch_of(sizes)
    shapes = [Mesh((n, ranks // n), names=("dp", "tp")) for n in (1, ranks)]
    plans = {f"plan_module {m.shape}": plan_module(model, topology, batch, forward=loss_of, mesh=m) for m in shapes}
    plans |= by_hand(ranks, sizes.n_layers)
    plans = dict(list(plans.items())[:count])
    predicted = []
    for name, plan in plans.items():
        price = price_module(model, plan, topology, batch, forward=loss_of)
        predicted.append(Predicted(name, price.seconds, [price.sent_bytes], price.peak_bytes))
    bare = [ModulePlan(plan.mesh, plan.styles, plan.units, plan.reshard) for plan in plans.values()]
    measured = launch(run, sizes, bare, rounds, nproc=ranks, timeout_seconds=600.0)
    report(f"A transformer of {sizes.n_layers} layers of {sizes.dim} on {ranks} ranks", predicted, measured)
