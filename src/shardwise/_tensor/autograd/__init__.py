"""Gradients of DTensors: backward, bucketed all-reduce, custom autograd Functions."""
