"""The recommender that `shardwise train` trains: its tables a collection, sharded by a plan.

Nothing is imported here, so that the command line can read a configuration without torch.
"""
