"""Replacements for names of mlx_lm/generate.py: the batch generator and the generators of steps."""
