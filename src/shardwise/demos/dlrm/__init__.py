"""A DLRM: will an ad be clicked? Tables of categories as a sharded collection, other layers under data parallelism."""
