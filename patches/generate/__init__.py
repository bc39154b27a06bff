"""What replaces names of mlx_lm/generate.py: the batch generator and the loops that make tokens."""
