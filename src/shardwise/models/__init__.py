"""Toy models with the names and the arithmetic of torch's own distributed tests."""

from shardwise.models.experts import ExpertLayer, Experts
from shardwise.models.mlp import MLPModule, MLPStacked, RMSNormPython
from shardwise.models.moe import MixtureOfExperts, Routing, balance_loss
from shardwise.models.transformer import Attention, FeedForward, ModelArgs, Transformer, TransformerBlock

__all__ = [
    "Attention", "ExpertLayer", "Experts", "FeedForward", "MLPModule", "MLPStacked", "MixtureOfExperts",
    "ModelArgs", "RMSNormPython", "Routing", "Transformer", "TransformerBlock", "balance_loss",
]  # fmt: skip
