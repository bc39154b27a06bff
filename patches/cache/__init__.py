"""Replacements for names of mlx_lm/models/cache.py, and the code that lays out a model's layers in a pool."""
