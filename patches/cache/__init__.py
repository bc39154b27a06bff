"""What replaces names of mlx_lm/models/cache.py, and how a model's layers come to lie in a pool."""
