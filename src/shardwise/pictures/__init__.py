"""What people look at: pictures of layouts, and tables of what ranks hold."""

from shardwise.pictures.drawing import Picture, picture
from shardwise.pictures.table import Placed, Table, sharding_table

__all__ = ["Picture", "Placed", "Table", "picture", "sharding_table"]
