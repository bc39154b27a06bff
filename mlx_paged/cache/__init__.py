"""mlx-lm's cache protocol over a pool, for one sequence and for a batch."""
