"""mlx-lm's cache protocol over a pool: of one sequence, and of a batch."""
