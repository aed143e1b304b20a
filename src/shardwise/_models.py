"""The toy models of torch's own distributed tests, in plain torch.

`shardwise.testing` offers the toy models. Their code does not depend on the number of ranks: heads are counted from the
width of the projections, so a `Transformer` runs on plain tensors, on DTensors, and on local heads.
"""

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise._collectives import DeviceMesh, as_mesh
from shardwise._layout import Count, Mesh, Replicate, Shard, checked_init
from shardwise.errors import ConfigError
from shardwise.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from shardwise.parallel.shard_module import shard_module

# ---- perceptrons ----------------------------------------------------------------------------------------------------


@checked_init
class RMSNormPython(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, written out in elementwise ops.

    Args:
        dim: size of the last dim of the input, (..., dim).
        eps: keeps a row of zeros finite.
    """

    def __init__(self, dim: Count, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self._norm(x) * self.weight


@checked_init
class MLPModule(nn.Module):
    """Linear 10 to 16, ReLU, linear 16 to 10. Sets torch's seed to 5, so that all instances have equal weights."""

    def __init__(self, device: torch.device | str | None, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net1 = nn.Linear(10, 16, bias=bias, device=device)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 10, bias=bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """(..., 10) -> (..., 10)."""
        return cast(Tensor, self.net2(self.relu(self.net1(x))))

    def reset_parameters(self) -> None:
        """Draw all weights anew from the current generator."""
        self.net1.reset_parameters()
        self.net2.reset_parameters()


@checked_init
class MLPStacked(nn.Module):
    """`n_layers` times `MLPModule`, one after the other."""

    def __init__(self, device: torch.device | str | None, n_layers: Count = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLPModule(device) for _ in range(n_layers)])

    def forward(self, x: Tensor) -> Tensor:
        """(..., 10) -> (..., 10)."""
        for layer in self.layers:
            x = layer(x)
        return x


# ---- a transformer --------------------------------------------------------------------------------------------------


@checked_init
@dataclass(frozen=True)
class ModelArgs:
    """Sizes and switches of a `Transformer`.

    Attributes:
        dropout_p: of embeddings, attention weights and both residual branches.
        use_attn_mask: causal attention.
        weight_tying: the output projection and the token table are one parameter.
        checkpoint_activations: activation checkpointing of blocks.
        num_experts: above 0, an `ExpertLayer` takes the place of each feed-forward layer.
        n_kv_heads: heads of keys and values, each shared by `n_heads / n_kv_heads` query heads; None is `n_heads`.
        hidden_dim: width of feed-forward layers and experts; None is `4 * dim`.

    Raises:
        ConfigError: a size that is not positive, or heads that do not divide `dim`.
    """

    n_layers: int = 2
    vocab_size: int = 8
    max_seq_len: int = 16
    dim: int = 16
    n_heads: int = 4
    dropout_p: float = 0.1
    use_attn_mask: bool = True
    weight_tying: bool = True
    checkpoint_activations: bool = False
    num_experts: int = 0
    n_kv_heads: int | None = None
    hidden_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_seq_len", "dim", "n_heads", "kv_heads", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a Transformer is {getattr(self, name)}. Fix: give a positive size.")
        if self.dim % self.n_heads:
            raise ConfigError(f"{self.n_heads} heads do not divide dim={self.dim}. Fix: choose n_heads that do.")
        if self.n_heads % self.kv_heads:
            raise ConfigError(
                f"{self.kv_heads} heads of keys and values cannot be shared evenly by {self.n_heads} query heads. "
                "Fix: choose n_kv_heads that divides n_heads."
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def ffn_dim(self) -> int:
        """Width of feed-forward layers and experts."""
        return 4 * self.dim if self.hidden_dim is None else self.hidden_dim


class Experts(nn.Module):
    """The sum over experts of w2[e] · gelu(w1[e] · x).

    Args:
        dim: width of a token.
        hidden_dim: width inside an expert.
        num_experts: first dim of both weights, so that experts can be sharded.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()
        self.gelu = nn.GELU()

    def reset_parameters(self) -> None:
        """Normal weights with standard deviation 0.02."""
        nn.init.normal_(self.w1, std=0.02)
        nn.init.normal_(self.w2, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, dim) -> (tokens, dim)."""
        each = x.unsqueeze(0).expand(self.w1.shape[0], -1, -1)
        hidden = self.gelu(torch.bmm(each, self.w1.transpose(-2, -1)))
        return torch.bmm(hidden, self.w2.transpose(-2, -1)).sum(dim=0)


class ExpertLayer(nn.Module):
    """The mean of `num_experts` experts, in place of a feed-forward layer."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.experts = Experts(dim=dim, hidden_dim=hidden_dim, num_experts=num_experts)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        mean = self.experts(x.flatten(0, 1)) / self.num_experts
        return cast(Tensor, mean.unflatten(0, x.shape[:2]))


class Attention(nn.Module):
    """Causal self-attention; keys and values may have fewer heads than queries."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.head_dim = args.head_dim
        self.n_heads = args.n_heads
        self.n_kv_heads = args.kv_heads
        self.dropout_p = args.dropout_p
        self.resid_dropout = nn.Dropout(args.dropout_p)
        self.use_attn_mask = args.use_attn_mask

        kv_dim = args.kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, args.dim, bias=False)
        self.wk = nn.Linear(args.dim, kv_dim, bias=False)
        self.wv = nn.Linear(args.dim, kv_dim, bias=False)
        self.wo = nn.Linear(args.dim, args.dim, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, heads · head_dim) -> (batch, heads, seq, head_dim), for as many heads as there are."""
        heads = x.shape[-1] // self.head_dim  # counted, because none at all cannot be inferred
        return cast(Tensor, x.unflatten(-1, (heads, self.head_dim))).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        queries, keys, values = self._heads(self.wq(x)), self._heads(self.wk(x)), self._heads(self.wv(x))
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            None,
            self.dropout_p if self.training else 0.0,
            self.use_attn_mask,
            enable_gqa=self.n_kv_heads != self.n_heads,
        )
        return cast(Tensor, self.resid_dropout(self.wo(mixed.transpose(1, 2).flatten(-2))))


class FeedForward(nn.Module):
    """Linear, GELU, linear, dropout."""

    def __init__(self, dim: int, hidden_dim: int, dropout_p: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.gelu = nn.GELU()
        self.w2 = nn.Linear(hidden_dim, dim)
        self.resid_dropout = nn.Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return cast(Tensor, self.resid_dropout(self.w2(self.gelu(self.w1(x)))))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward or expert layer, each after a normalisation and added to its input."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(args.dim)
        self.attention = Attention(args)
        self.ffn_norm = nn.LayerNorm(args.dim)
        self.has_experts = args.num_experts > 0
        if self.has_experts:
            self.expert_layer = ExpertLayer(args.num_experts, dim=args.dim, hidden_dim=args.ffn_dim)
        else:
            self.feed_forward = FeedForward(args.dim, hidden_dim=args.ffn_dim, dropout_p=args.dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) -> (batch, seq, dim)."""
        hidden = x + self.attention(self.attention_norm(x))
        second = self.expert_layer if self.has_experts else self.feed_forward
        return cast(Tensor, hidden + second(self.ffn_norm(hidden)))


@checked_init
class Transformer(nn.Module):
    """Token and position embeddings, `n_layers` blocks, a normalisation, and logits over the vocabulary."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.model_args = args
        self.max_seq_len = args.max_seq_len
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.pos_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.dropout = nn.Dropout(args.dropout_p)
        self.layers = nn.ModuleList([TransformerBlock(args) for _ in range(args.n_layers)])
        self.norm = nn.LayerNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.weight_tying:
            self.output.weight = self.tok_embeddings.weight
        self.checkpoint_activations = args.checkpoint_activations

    def forward(self, tokens: Tensor) -> Tensor:
        """Integer tokens (batch, seq) -> logits of the next token, float32 (batch, seq, vocab_size).

        Raises:
            ConfigError: a sequence that is longer than the table of positions.
        """
        _, seq_len = tokens.size()
        if seq_len > self.max_seq_len:
            raise ConfigError(
                f"A sequence of {seq_len} tokens is longer than max_seq_len={self.max_seq_len}. "
                f"Fix: ModelArgs(max_seq_len={seq_len}), or shorter sequences."
            )
        positions = self.pos_embeddings(torch.arange(0, seq_len, device=tokens.device))  # (seq, dim)
        hidden = self.dropout(self.tok_embeddings(tokens) + positions)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.checkpoint_activations else layer(hidden)
        return cast(Tensor, self.output(self.norm(hidden)).float())

    @staticmethod
    def parallelize(
        module: "Transformer",
        device_mesh: Mesh | DeviceMesh,
        use_seq_parallel: bool,
        local_output_for_attn: bool = False,
        *,
        gather_output: bool = True,
        src_data_rank: int | None = 0,
    ) -> nn.Module:
        """Shard heads, features and vocabulary of a Transformer along the axis "tp" (else the last), in place.

        Works for any number of heads and ranks; heads that share keys and values stay on one rank. Other parameters
        are replicated. Other mesh axes are data axes: every rank passes its shard of the batch.

        Args:
            use_seq_parallel: shard activations between layers along the sequence dim.
            local_output_for_attn: attention runs on plain local heads; not supported with dropout.
            gather_output: return plain, replicated logits. Otherwise a DTensor sharded along the vocabulary, for
                `loss_parallel`.
            src_data_rank: as of `parallelize_module`.

        Raises:
            ConfigError: this is no Transformer, or dropout would depend on the sharding of heads.
        """
        if not isinstance(module, Transformer):
            raise ConfigError(
                f"Transformer.parallelize needs a Transformer, got {type(module).__name__}. "
                f"Fix: parallelize_module for other modules."
            )
        if local_output_for_attn and module.model_args.dropout_p > 0:
            raise ConfigError(
                "Plain heads drop the same weights on every rank, and as many as the rank has heads. Fix: leave "
                "local_output_for_attn off, or build the Transformer with dropout_p=0."
            )
        args, mesh = module.model_args, as_mesh(device_mesh)
        output = ColwiseParallel(output_layouts=Replicate() if gather_output else None, use_local_output=gather_output)
        for plan in (_plan(args, mesh.ndim, use_seq_parallel, local_output_for_attn), {"output": output}):
            parallelize_module(module, device_mesh, plan, src_data_rank=src_data_rank)
        return shard_module(module, {}, mesh=device_mesh, src_rank=src_data_rank)


def _plan(args: ModelArgs, axes: int, sequence: bool, local_heads: bool) -> dict[str, ParallelStyle]:
    """The styles of all layers but the last; without `sequence` activations between layers are replicated."""
    replicated = (Replicate(),) * axes
    between = Shard(1) if sequence else Replicate()
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    heads = ColwiseParallel(use_local_output=local_heads, unit=args.head_dim)
    groups = args.head_dim * (args.n_heads // args.kv_heads)  # queries that share keys and values stay together
    row_parallel = RowwiseParallel(output_layouts=between, use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between, use_local_output=False),
        # Positions are the same for every shard of the batch.
        "pos_embeddings": PrepareModuleInput(input_layouts=(replicated,), desired_input_layouts=(replicated,)),
        "layers.*.attention.wq": replace(heads, unit=groups),
        "layers.*.attention.w[kv]": heads,
        "layers.*.attention.wo": replace(row_parallel, unit=groups),
    }
    if not args.num_experts:
        plan |= {
            "layers.*.feed_forward.w1": ColwiseParallel(use_local_output=False),
            "layers.*.feed_forward.w2": row_parallel,
        }
    if sequence:
        norms = dict.fromkeys(("norm", "layers.*.attention_norm", "layers.*.ffn_norm"), SequenceParallel())
        plan |= {**norms, "layers.*.attention": gathered}
    return plan
