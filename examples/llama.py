"""Trains a Llama of Hugging Face with FSDP over `dp` and tensor parallelism over `tp`; the model is unchanged.

It is built from a config with random weights, so nothing is downloaded. Its own plan gives the tensor parallelism; each
layer is a unit of `fully_shard`, computes in bfloat16, and adds gradients in float32. A token of a sequence is some
number more than the one before, and the model learns to see by how much. Some sequences are kept for the evaluation. On
four ranks simulated in this process, or on four real ones, after `pip install transformers`:

    python examples/llama.py
    torchrun --nproc-per-node 4 examples/llama.py runs/llama

prints

    step  1, loss 4.11
    step 40, loss 0.23
    92% of the tokens of other sequences are right
    rank 0 has 28% of 27,900 parameters

With a folder it saves every 20 steps, and the same command goes on from there, also on another number of ranks:
`tp` is 2, and `dp` the rest.
"""

import os
import sys
from typing import NamedTuple

import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint import latest, restore, save, state_of
from shardwise.collectives import under_torchrun
from shardwise.parallel import MixedPrecisionPolicy, fully_shard, parallelize_module, plan_from_transformers
from shardwise.testing import world

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, LENGTH, LARGEST_STEP = 61, 12, 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Result(NamedTuple):
    """Of a run: losses of its steps, the part of held-out tokens that are right, the part of parameters here."""

    first_step: int
    losses: list[float]
    accuracy: float
    part: float
    num_parameters: int


def plain_model() -> LlamaForCausalLM:
    """6 query heads, 3 key heads and 61 tokens: 2 ranks divide neither keys nor tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=36, intermediate_size=72, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def shard(model: LlamaForCausalLM, mesh: sw.DeviceMesh, mp_policy: MixedPrecisionPolicy) -> None:
    """Over `tp` by the model's own plan; then every layer, and what is not in a layer, over `dp`."""
    parallelize_module(model, mesh["tp"], plan_from_transformers(model))
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh["dp"], mp_policy=mp_policy)


def sequences(seed: int, size: int, held_out: bool = False) -> Tensor:
    """Tokens, [size, LENGTH]. One in five sequences, by where it begins and its step, is held out."""
    every = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(1, LARGEST_STEP + 1))
    which = every[((every[:, 0] + every[:, 1]) % 5 == 0) == held_out]
    chosen = which[torch.randint(len(which), (size,), generator=torch.Generator().manual_seed(seed))]
    return (chosen[:, :1] + chosen[:, 1:] * torch.arange(LENGTH)) % VOCAB


def of_this_rank(x: Tensor, mesh: sw.DeviceMesh) -> Tensor:
    """The same rows on all ranks of `tp`. Gradients are averaged, so all ranks of `dp` have equally many."""
    ranks = mesh["dp"].size()
    if len(x) % ranks:
        raise ValueError(f"{ranks} ranks of dp do not divide {len(x)} sequences")
    return x.chunk(ranks)[mesh["dp"].get_local_rank()]


def mean(x: Tensor, mesh: sw.DeviceMesh) -> float:
    """The mean over all ranks of `dp` of a number of each."""
    return sw.DTensor.from_local(x.detach().float()[None], mesh["dp"], [sw.Shard(0)]).mean().item()


def evaluate(model: LlamaForCausalLM, mesh: sw.DeviceMesh, size: int) -> float:
    """How many tokens of held-out sequences are predicted; the first two of a sequence say its step."""
    ids = of_this_rank(sequences(0, size, held_out=True), mesh)
    with torch.no_grad():
        predicted = model(input_ids=ids).logits.argmax(-1)
    return mean((predicted[:, 1:-1] == ids[:, 2:]).float().mean(), mesh)


def train(
    folder: str | None = None, steps: int = 40, size: int = 64, tp: int = 2,
    mp_policy: MixedPrecisionPolicy = BF16, save_every: int = 20,
) -> Result:  # fmt: skip
    """Trains from the last checkpoint of `folder` to step `steps`, `size` sequences a step. Runs on every rank."""
    mesh = sw.init_device_mesh("cpu", (sw.world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    model = plain_model()
    shard(model, mesh, mp_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    first = restore(folder, model, optimizer, schedule).step if folder and latest(folder) else 0
    losses = []
    for step in range(first, steps):
        ids = of_this_rank(sequences(step, size), mesh)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(mean(loss, mesh))
        if folder and (step + 1) % save_every == 0:
            save(folder, state_of(model, optimizer, schedule), step=step + 1, keep=2)
    total = sum(p.numel() for p in model.parameters())
    local = sum(p.to_local().numel() for p in model.parameters())
    return Result(first, losses, evaluate(model, mesh, size), local / total, total)


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    result = sw.launch(train, folder, nproc=4) if under_torchrun() else world(4, timeout=600).run(train, folder)[0]
    if sw.rank() == 0:
        if result.first_step:
            print(f"goes on from step {result.first_step}")
        for step in sorted({0, len(result.losses) - 1} & set(range(len(result.losses)))):
            print(f"step {result.first_step + step + 1:>2}, loss {result.losses[step]:.2f}")
        print(f"{result.accuracy:.0%} of the tokens of other sequences are right")
        print(f"rank 0 has {result.part:.0%} of {result.num_parameters:,} parameters")
