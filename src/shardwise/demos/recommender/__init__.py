"""The recommender that `shardwise train` trains: an ordinary model, sharded by a plan.

Nothing is imported here, so that the command line can read a configuration without torch.
"""
