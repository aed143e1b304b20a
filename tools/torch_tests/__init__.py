"""PyTorch's own tests of distributed tensors, with torch's module names meaning shardwise."""
