"""A GPT in the manner of nanoGPT, on a mesh of 2 x 2 ranks: heads and features sharded over `tp`, batch over `dp`.

Each block is also a unit of `fully_shard` over `dp`, so a rank has about a quarter of the parameters and of the states
of the optimizer. The text is generated: sums, whose results the model learns to predict. Its end is held out for the
evaluation. On four ranks simulated in this process, or on four real ones:

    python examples/nanogpt.py
    torchrun --nproc-per-node 4 examples/nanogpt.py runs/nanogpt

prints

    step  1, loss 2.66
    step 40, loss 1.78
    held-out text, loss 1.77
    rank 0 has 26% of 26,752 parameters

With a folder it saves every 10 steps and goes on from there, also with another `--nproc-per-node`.
"""

import random
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import latest, restore, save, state_of
from shardwise.launch import under_torchrun
from shardwise.parallel import fully_shard
from shardwise.testing import world

CONTEXT, DIM, HEADS, LAYERS = 32, 32, 4, 2
# What `tp` shards: the outputs of the first layer of each pair, the inputs of the second one, rows of the table.
COLUMN, ROW = {"tp": sw.Shard(0)}, {"tp": sw.Shard(1)}
PLAN = {
    "token.weight": COLUMN,
    "blocks.*.qkv.weight": COLUMN,
    "blocks.*.out.weight": ROW,
    "blocks.*.up.weight": COLUMN,
    "blocks.*.down.weight": ROW,
    "head.weight": COLUMN,
}


def text() -> str:
    """Lines such as "7+46=53"."""
    numbers = random.Random(0)
    pairs = [(numbers.randrange(50), numbers.randrange(50)) for _ in range(2000)]
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


CHARACTERS = sorted(set(text()))
TOKENS, HELD_OUT = torch.tensor([CHARACTERS.index(character) for character in text()]).tensor_split([-2000])


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # One head after the other, each with its queries, keys and values: so a shard of the weight has entire heads.
        heads = self.qkv(self.norm1(x)).unflatten(2, (HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, 3), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Scores of the next character, [windows, characters of each, characters that there are]."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(CHARACTERS), DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, len(CHARACTERS), bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def batch(text: Tensor, seed: int, windows: int) -> tuple[Tensor, Tensor]:
    """Some windows of a text, equal on all ranks, and the next character of each character."""
    starts = torch.randint(len(text) - CONTEXT, (windows,), generator=torch.Generator().manual_seed(seed))
    found = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


def shard(model: nn.Module, mesh: sw.DeviceMesh) -> None:
    """Over `tp` by the plan; then every block, and what is not in a block, over `dp`."""
    sw.shard_module(model, PLAN, mesh=mesh)
    for unit in (*model.get_submodule("blocks").children(), model):
        fully_shard(unit, mesh=mesh["dp"])


def loss_of(model: nn.Module, mesh: sw.DeviceMesh, tokens: Tensor, following: Tensor) -> Tensor:
    """The mean over the windows of all ranks; each rank of `dp` computes some of them."""
    tokens, following = (sw.distribute_tensor(x, mesh, {"dp": sw.Shard(0)}) for x in (tokens, following))
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


# Losses by step, that of held-out text, the part of the parameters that this rank has, and how many there are.
Result = tuple[dict[int, float], float, float, int]


def train(folder: str | None = None, steps: int = 40, windows: int = 16, save_every: int = 10) -> Result:
    """Trains from the last checkpoint of `folder` to step `steps`, `windows` a step. Runs on every rank."""
    tp = 2 - sw.world_size() % 2  # 1 if the ranks are odd in number
    mesh = sw.init_device_mesh("cpu", (sw.world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = GPT()
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = restore(folder, model, optimizer).step if folder and latest(folder) else 0
    losses = {}
    for step in range(first + 1, steps + 1):
        loss = loss_of(model, mesh, *batch(TOKENS, step, windows))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step] = loss.item()
        if folder and step % save_every == 0:
            save(folder, state_of(model, optimizer), step=step, keep=2)
    with torch.no_grad():
        held_out = loss_of(model, mesh, *batch(HELD_OUT, 0, 4 * windows)).item()
    total = sum(parameter.numel() for parameter in model.parameters())
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return losses, held_out, local / total, total


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    result = sw.launch(train, folder, nproc=4) if under_torchrun() else world(4).run(train, folder)[0]
    losses, held_out, part, total = result
    if sw.rank() == 0:
        for step in [*losses][:: max(1, len(losses) - 1)]:
            print(f"step {step:>2}, loss {losses[step]:.2f}")
        print(f"held-out text, loss {held_out:.2f}")
        print(f"rank 0 has {part:.0%} of {total:,} parameters")
