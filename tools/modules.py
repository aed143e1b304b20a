"""Modules of torch.nn and timm, with the batch, the parameters or both sharded, beside one process.

    pip install timm -c constraints.txt
    python -m tools.modules                        # all of them on 2 and 3 ranks: 10 minutes
    python -m tools.modules --only 'LSTM|ViT' --ranks 2

Compared are results, gradients of parameters and of inputs, and buffers after three steps of SGD. Batches and most
parameters are uneven. The exit status is 1 if any of it failed.
"""

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.testing import assert_close

from shardwise import DTensor, Mesh, Replicate, Shard, distribute_tensor, shard_module
from shardwise._layout import Placement
from shardwise.testing import world

BATCH, RANKS, TIMEOUT, WIDTH = 5, (2, 3), 600, 220
Values = dict[str, Tensor]


def random(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int) -> Tensor:
    """From 0 to `high` - 1."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


# ---- modules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A module, its inputs, and the dim of the batch in them."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    batch_dim: int = 0


class First(nn.Module):
    """The first result of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Any:
        return self.inner(*inputs)[0]


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of one input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 3, batch_first=True, **options)

    def forward(self, x: Tensor) -> Any:
        out, weights = self.inner(x, x, x, average_attn_weights=False)
        return out + weights.sum((1, 2, 3))[:, None, None]


class UNet(nn.Module):
    """Down, up, and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 5, 4, stride=2, padding=1)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.cat([x, self.up(self.down(x).relu())], 1))


def layers(*modules: nn.Module) -> Callable[[], nn.Module]:
    """A sequence of copies."""
    return lambda: nn.Sequential(*map(deepcopy, modules))


def timm(name: str, size: int = 32, **options: Any) -> Case:
    """An image model of timm with random weights. Of small images, some models amplify rounding a billion times."""

    def build() -> nn.Module:
        for op in ("nms", "qnms"):  # torchvision's wheel has no ops beside a CPU build of torch
            if not hasattr(torch.ops.torchvision, op):
                torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        model: nn.Module = import_module("timm").create_model(name, num_classes=7, **options)
        return model

    size = options.get("img_size", size)
    return Case(build, lambda: (random(BATCH, 3, size, size),))


IMAGES = lambda: (random(BATCH, 3, 8, 8),)  # noqa: E731
ROWS = lambda: (random(BATCH, 6),)  # noqa: E731
SEQUENCES = lambda: (random(BATCH, 7, 12),)  # noqa: E731
PAIRS = lambda: (random(BATCH, 7, 12), random(BATCH, 4, 12, seed=2))  # noqa: E731

CASES: dict[str, Case] = {
    "timm resnet18": timm("resnet18"),
    "timm resnet26d": timm("resnet26d"),
    "timm convnext_atto": timm("convnext_atto"),
    "timm vit_tiny": timm("vit_tiny_patch16_224", img_size=32),
    "timm swin": timm(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), embed_dim=12, num_heads=(2, 3), drop_path_rate=0.0
    ),
    "timm mixer": timm("mixer_s32_224", img_size=32),
    "timm efficientnet_b0": timm("efficientnet_b0", size=96),
    "timm mobilenetv3_small": timm("mobilenetv3_small_050"),
    "timm regnety_002": timm("regnety_002"),
    "LSTM": Case(lambda: First(nn.LSTM(12, 5, num_layers=2, batch_first=True)), SEQUENCES),
    "LSTM, both directions, projection": Case(
        lambda: First(nn.LSTM(12, 6, bidirectional=True, proj_size=5)), lambda: (random(7, BATCH, 12),), 1
    ),
    "GRU": Case(lambda: First(nn.GRU(12, 5, batch_first=True, bidirectional=True)), SEQUENCES),
    "RNN": Case(lambda: First(nn.RNN(12, 5, nonlinearity="relu", batch_first=True)), SEQUENCES),
    "LSTMCell": Case(lambda: First(nn.LSTMCell(6, 5)), ROWS),
    "MultiheadAttention": Case(SelfAttention, SEQUENCES),
    "MultiheadAttention, bias_kv, zero_attn": Case(
        lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True), SEQUENCES
    ),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 3, 10, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        SEQUENCES,
    ),
    "Transformer": Case(
        lambda: nn.Transformer(12, 2, 2, 2, dim_feedforward=10, dropout=0.0, activation="gelu", batch_first=True),
        PAIRS,
    ),
    "TransformerDecoderLayer": Case(
        lambda: nn.TransformerDecoderLayer(12, 2, 10, dropout=0.0),
        lambda: (random(7, BATCH, 12), random(4, BATCH, 12, seed=2)),
        1,
    ),
    "BatchNorm": Case(
        layers(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(180)), IMAGES
    ),
    "SyncBatchNorm": Case(layers(nn.Conv2d(3, 5, 3), nn.SyncBatchNorm(5), nn.ReLU()), IMAGES),
    "GroupNorm, InstanceNorm": Case(
        layers(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        IMAGES,
    ),
    "LayerNorm, RMSNorm": Case(layers(nn.LayerNorm(6), nn.Linear(6, 5), nn.RMSNorm(5), nn.SiLU()), ROWS),
    "Conv1d, Conv3d": Case(
        layers(nn.Conv1d(7, 4, 3, groups=1, dilation=2), nn.Unflatten(2, (2, 2, 2)), nn.Conv3d(4, 3, 2)), SEQUENCES
    ),
    "ConvTranspose2d": Case(UNet, IMAGES),
    "pooling, Upsample, PixelShuffle": Case(
        layers(
            nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
            nn.PixelShuffle(2),
            nn.MaxPool2d(3, 2, 1),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.AdaptiveAvgPool2d(3),
            nn.PReLU(2),
        ),
        IMAGES,
    ),
    "weight_norm": Case(
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 5)), nn.Tanh(), weight_norm(nn.Linear(5, 3))), ROWS
    ),
    "spectral_norm": Case(lambda: nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Tanh()), ROWS),
    "orthogonal": Case(lambda: nn.Sequential(orthogonal(nn.Linear(6, 5)), nn.Tanh()), ROWS),
    "Bilinear": Case(lambda: nn.Bilinear(6, 4, 5), lambda: (random(BATCH, 6), random(BATCH, 4, seed=2))),
    "Embedding": Case(layers(nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 3)), lambda: (integers(11, BATCH, 4),)),
    "EmbeddingBag": Case(
        layers(nn.EmbeddingBag(11, 6, mode="mean"), nn.Linear(6, 3)), lambda: (integers(11, BATCH, 4),)
    ),
    "AdaptiveLogSoftmaxWithLoss": Case(
        lambda: First(nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 11], div_value=2.0)),
        lambda: (random(BATCH, 6), integers(20, BATCH)),
    ),
}

# ---- one of them, sharded ---------------------------------------------------------------------------------------


def by_rows(module: nn.Module) -> dict[str, Placement]:
    """Every parameter along dim 0."""
    return {name: Shard(0) if p.ndim else Replicate() for name, p in module.named_parameters()}


# What is sharded: whether the batch is, and the plan of the parameters.
MODES: dict[str, tuple[bool, Callable[[nn.Module], dict[str, Placement]]]] = {
    "batch": (True, lambda module: {}),
    "parameters": (False, by_rows),
    "both": (True, by_rows),
}


def full(x: Tensor) -> Tensor:
    """The full tensor, detached."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def trained(module: nn.Module, inputs: Sequence[Tensor]) -> Values:
    """Results and gradients of the first step, and parameters and buffers after three."""
    optimizer, values = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), {}
    for step in range(3):
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        optimizer.zero_grad()
        out = module(*leaves)
        loss = out.square().mean() + out.sin().mean()
        loss.backward()
        values[f"loss {step}"] = full(loss)
        if step == 0:
            values["result"] = full(out)
            values |= {f"gradient of input {i}": full(x.grad) for i, x in enumerate(leaves) if x.grad is not None}
            named = module.named_parameters()
            values |= {f"gradient of {name}": full(p.grad) for name, p in named if p.grad is not None}
        optimizer.step()
    return values | {name: full(x) for name, x in module.state_dict().items()}


def judge(case: Case, mode: str, ranks: int) -> str:
    """ "" if the sharded module equals the plain one, else what differs."""
    torch.manual_seed(0)
    plain, inputs = case.build().double(), case.inputs()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    shards_batch, plan = MODES[mode]

    def body() -> Values:
        mesh = Mesh((ranks,))
        module = shard_module(deepcopy(plain), plan(plain), mesh=mesh)
        placement = Shard(case.batch_dim) if shards_batch else Replicate()
        return trained(module, [distribute_tensor(x, mesh, [placement]) for x in inputs])

    try:
        got = world(ranks, timeout=TIMEOUT).run(body)[0]
    except Exception as error:  # noqa: BLE001 - whatever a module raises is the result
        return f"{type(error).__name__}: {error}"
    want = trained(deepcopy(plain), inputs)
    if got.keys() != want.keys():
        return f"only one has {sorted(got.keys() ^ want.keys())}"
    problems = []
    for name, x in want.items():
        try:
            assert_close(got[name], x, rtol=1e-6, atol=1e-9)
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return "\n".join(problems)


# ---- all of them ------------------------------------------------------------------------------------------------

Results = dict[tuple[str, str], list[int]]  # of a case and mode: the ranks on which it failed


def table(results: Results) -> str:
    """A row a module, a column a mode."""
    lines = [f"| | {' | '.join(MODES)} |", f"| --- |{' --- |' * len(MODES)}"]
    for name in dict.fromkeys(name for name, _ in results):
        failed = [results[name, mode] for mode in MODES]
        cells = [f"not on {' and '.join(map(str, ranks))} ranks" if ranks else "equal" for ranks in failed]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=".*", help="modules whose names match")
    parser.add_argument("--ranks", type=int, action="append")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results: Results = {}
    for name, case in CASES.items():
        if not re.fullmatch(args.only, name):
            continue
        for mode in MODES:
            failed = results[name, mode] = []
            for ranks in args.ranks or RANKS:
                problem = judge(case, mode, ranks)
                if problem:
                    failed.append(ranks)
                print(f"{name}, {mode} on {ranks}: {' '.join(problem.split())[:WIDTH] or 'equal'}", flush=True)
    print(f"\n{table(results)}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
