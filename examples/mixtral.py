"""Fine-tunes a Mixtral of Hugging Face, its experts sharded over `ep` and the batch over `dp`; the model is unchanged.

It is built from a config, so nothing is downloaded; `from_pretrained` in its place loads one. Each rank computes its
own experts, which are most of the parameters. The texts are sequences that count up. On four ranks simulated in this
process, or on four real ones, after `pip install transformers`:

    python examples/mixtral.py
    torchrun --nproc-per-node 4 examples/mixtral.py

prints

    step  1, loss 4.13
    step 10, loss 1.90
    rank 0 has 61% of 47,520 parameters
"""

import os

import torch
from torch import Tensor

import shardwise as sw
from shardwise.launch import under_torchrun
from shardwise.testing import world

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import MixtralConfig, MixtralForCausalLM

VOCAB, LENGTH = 64, 16
MESH = {"dp": 2, "ep": 2}
PLAN = {"**.experts.*": {"ep": sw.Shard(0)}}  # stacked by experts; all other parameters are replicated


def plain_model() -> MixtralForCausalLM:
    """2 layers of 4 experts, of which a token chooses 2."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def batch(step: int, size: int) -> Tensor:
    """Sequences that count up from some token, [size, LENGTH]; equal on all ranks."""
    first = torch.randint(VOCAB, (size, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH)) % VOCAB


def train(steps: int = 10, size: int = 16) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, the weights as the plain model has them, and the part of them on this rank. Runs on every rank."""
    mesh = sw.Mesh(tuple(MESH.values()), names=tuple(MESH))
    model = sw.shard_module(plain_model(), PLAN, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        ids = sw.distribute_tensor(batch(step, size), mesh, {"dp": sw.Shard(0)})
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = dict(model.named_parameters())
    part = sum(p.to_local().numel() for p in parameters.values()) / sum(p.numel() for p in parameters.values())
    # For `save_pretrained(folder, state_dict=...)`; a model that fits on no rank goes to `shardwise.checkpoint`.
    return losses, {name: p.detach().full_tensor() for name, p in parameters.items()}, part


if __name__ == "__main__":
    losses, weights, part = sw.launch(train, nproc=4) if under_torchrun() else world(4).run(train)[0]
    if sw.rank() == 0:
        for step in (1, 10):
            print(f"step {step:>2}, loss {losses[step - 1]:.2f}")
        print(f"rank 0 has {part:.0%} of {sum(weight.numel() for weight in weights.values()):,} parameters")
