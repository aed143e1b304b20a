from shardwise.testing.truth import *  # noqa: F403
