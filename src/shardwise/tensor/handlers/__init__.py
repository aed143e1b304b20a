"""Torch functions that need more than a rule: indexing, lists of tensors, optimisers, sparse gradients, attributes."""
