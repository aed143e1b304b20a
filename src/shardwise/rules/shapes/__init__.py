"""Op rules: shapes."""
