"""Starting ranks on this machine."""

from shardwise._launch.launcher import launch, under_torchrun

__all__ = ["launch", "under_torchrun"]
