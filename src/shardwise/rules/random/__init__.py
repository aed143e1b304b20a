"""Op rules: random."""
