"""Pictures of layouts, and tables of what each rank holds."""

from shardwise._pictures.drawing import Picture, picture
from shardwise._pictures.table import Placed, Table, sharding_table

__all__ = ["Picture", "Placed", "Table", "picture", "sharding_table"]
