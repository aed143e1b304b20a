"""Op rules: reductions."""
