"""Forward and backward of small models: an MLP, linear layers, a Transformer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import interleaved, print_table
from systems import COLUMNS, System, figures, systems
from torch import Tensor, nn

WIDTH, DEPTH, BATCH = 16, 4, 8

# placements of the input, and of weight and bias of the layers in turn
PATTERNS = {
    "replicated weights, input Shard(0)": ("0", ["RR"]),
    "weights Shard(0), input Replicate": ("R", ["00"]),
    "weights Shard(0) and Shard(1) in turn": ("R", ["00", "1R"]),
}


def model(system: System, layers: list[str], relu: bool) -> nn.Sequential:
    """Linear layers, each with an optional ReLU behind it, whose parameters belong to `system`."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for i in range(DEPTH):
        linear = nn.Linear(WIDTH, WIDTH)
        letters = layers[i % len(layers)]
        linear.weight = nn.Parameter(system.make(linear.weight.detach(), letters[0]))
        linear.bias = nn.Parameter(system.make(linear.bias.detach(), letters[1]))
        parts += [linear, nn.ReLU()] if relu else [linear]
    return nn.Sequential(*parts)


def step(net: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward, backward, a look at every gradient."""
    params = list(net.parameters())

    def run() -> None:
        net(x).sum().backward()
        for p in params:
            assert p.grad is not None
            p.grad = None

    return run


def models(rounds: int, calls: int) -> None:
    rows = []
    for kind, relu in (("MLP with ReLU", True), ("linears", False)):
        for pattern, (x_letter, layers) in PATTERNS.items():
            x = torch.randn(BATCH, WIDTH)
            steps = {s.name: step(model(s, layers, relu), s.make(x, x_letter)) for s in systems()}
            rows.append([f"{kind}; {pattern}", *figures(interleaved(steps, rounds, calls))])
    print_table(
        f"Forward and backward of {DEPTH} layers, batch {BATCH}, width {WIDTH}; microseconds, best of {rounds} rounds\n"
        "overhead = variant - plain; the last columns are overhead of ours / overhead of torch",
        ["model", *COLUMNS],
        rows,
    )


# ---- a Transformer ------------------------------------------------------------------------------------------

DIM, HEADS, TOKENS, VOCABULARY = 64, 4, 16, 100
# Split as tensor parallelism splits: what enters a pair of layers by columns leaves it by rows.
BY_COLUMNS, BY_ROWS = ("wq", "wk", "wv", "up", "head"), ("wo", "down")


class Block(nn.Module):
    """Attention and a feed-forward pair, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norm1(x)
        batch, tokens, _ = h.shape
        q, k, v = (w(h).view(batch, tokens, HEADS, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        # By hand: torch.distributed.tensor has no rule for the fused kernel of CPUs, and none for causal masks.
        mixed = F.softmax(q @ k.transpose(-2, -1) * (DIM // HEADS) ** -0.5 + mask, -1) @ v
        x = x + self.wo(mixed.transpose(1, 2).reshape(batch, tokens, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(at)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def transformer(system: System, split: bool) -> nn.Module:
    """With parameters of `system`: all replicated, or split for tensor parallelism."""
    torch.manual_seed(0)
    net = Transformer()
    for path, module in net.named_modules():
        name = path.rpartition(".")[2]
        letter_of_weight = "0" if name in BY_COLUMNS else "1" if name in BY_ROWS else "R"
        for key, parameter in list(module.named_parameters(recurse=False)):
            letter = "R" if not split or (letter_of_weight == "1" and key == "bias") else letter_of_weight
            setattr(module, key, nn.Parameter(system.make(parameter.detach(), letter)))
    return net


def transformer_step(system: System, split: bool) -> Callable[[], None]:
    net = transformer(system, split)
    params = list(net.parameters())
    letter = "R" if split else "0"
    ids = system.make(torch.randint(VOCABULARY, (BATCH, TOKENS)), letter)
    mask = system.make(torch.full((TOKENS, TOKENS), float("-inf")).triu(1), "R")
    at = system.make(torch.arange(TOKENS).expand(BATCH, TOKENS).contiguous(), letter)

    def run() -> None:
        net(ids, at, mask).sum().backward()
        for p in params:
            assert p.grad is not None
            p.grad = None

    return run


def transformers(rounds: int, calls: int) -> None:
    """The full table."""
    rows = []
    for name, split in (("replicated weights, batch Shard(0)", False), ("tensor parallel", True)):
        steps = {s.name: transformer_step(s, split) for s in systems()}
        rows.append([name, *figures(interleaved(steps, rounds, calls))])
    print_table(
        f"Forward and backward of a Transformer of {DEPTH} layers, dim {DIM}, {BATCH} x {TOKENS} tokens; microseconds",
        ["model", *COLUMNS],
        rows,
    )
