"""Adapters between mlx-lm and the paged engine: the only code that touches mlx-lm's names."""
