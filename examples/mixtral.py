"""Fine-tunes a Mixtral of Hugging Face, its experts sharded over `ep` and the batch over `dp`; the model is unchanged.

It is built from a config, so nothing is downloaded. With a folder of a Mixtral, as it is published (`config.json` and
safetensors), that one is trained: each rank makes and reads its own experts only, which are most of the parameters. The
texts are sequences that count up. On four ranks simulated in this process, or on four real ones, after
`pip install transformers accelerate`:

    python examples/mixtral.py
    torchrun --nproc-per-node 4 examples/mixtral.py downloaded/mixtral

prints

    step  1, loss 4.13
    step 10, loss 1.90
    rank 0 has 61% of 47,520 parameters
"""

import os
import sys

import torch
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint import load_safetensors
from shardwise.collectives import under_torchrun
from shardwise.testing import world

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from accelerate import init_empty_weights
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


def sharded_model(folder: str | None, mesh: sw.Mesh) -> MixtralForCausalLM:
    """A new one, or that of `folder`, of which no rank ever holds a full copy."""
    if folder is None:
        return sw.shard_module(plain_model(), PLAN, mesh=mesh)
    with init_empty_weights():
        model = MixtralForCausalLM(MixtralConfig.from_pretrained(folder))
    sw.shard_module(model, PLAN, mesh=mesh)
    load_safetensors(folder, model)
    return model


def batch(step: int, size: int) -> Tensor:
    """Sequences that count up from some token, [size, LENGTH]; equal on all ranks."""
    first = torch.randint(VOCAB, (size, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH)) % VOCAB


def train(steps: int = 10, size: int = 16, folder: str | None = None) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, the weights as the plain model has them, and the part of them on this rank. Runs on every rank."""
    mesh = sw.Mesh(tuple(MESH.values()), names=tuple(MESH))
    model = sharded_model(folder, mesh)
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
    arguments = (10, 16, sys.argv[1] if len(sys.argv) > 1 else None)
    run = sw.launch(train, *arguments, nproc=4) if under_torchrun() else world(4).run(train, *arguments)[0]
    losses, weights, part = run
    if sw.rank() == 0:
        for step in (1, 10):
            print(f"step {step:>2}, loss {losses[step - 1]:.2f}")
        print(f"rank 0 has {part:.0%} of {sum(weight.numel() for weight in weights.values()):,} parameters")
