"""Kernels for CUDA that are compiled here and not by MLX, and kept on disk (docs/adr/0025)."""
