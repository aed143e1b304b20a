from shardwise.testing.pieces import *  # noqa: F403
