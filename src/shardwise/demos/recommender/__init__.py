"""The recommender that `shardwise train` trains: an ordinary model, cut by a plan from outside.

Nothing is imported here, so that the command line can read a configuration without torch.
"""
