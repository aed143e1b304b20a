"""Torch functions that need more than a rule: indexing, lists of tensors, optimizers, sparse gradients, attributes."""
