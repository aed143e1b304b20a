"""What people look at: pictures of layouts, and tables of what ranks hold."""

from shardwise.report.drawing import Picture, picture
from shardwise.report.table import Placed, Table, sharding_table

__all__ = ["Picture", "Placed", "Table", "picture", "sharding_table"]
