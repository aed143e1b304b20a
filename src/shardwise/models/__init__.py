"""Toy models with the names and the arithmetic of torch's own test kit, to try distributed code on."""

from shardwise.models.experts import ExpertLayer, Experts
from shardwise.models.mlp import MLPModule, MLPStacked, RMSNormPython
from shardwise.models.transformer import Attention, FeedForward, ModelArgs, Transformer, TransformerBlock

__all__ = [
    "Attention", "ExpertLayer", "Experts", "FeedForward", "MLPModule", "MLPStacked", "ModelArgs", "RMSNormPython",
    "Transformer", "TransformerBlock",
]  # fmt: skip
