"""Adapters of modules of mlx.nn."""
