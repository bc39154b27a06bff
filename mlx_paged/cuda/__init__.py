"""CUDA kernels that this package compiles instead of MLX, and keeps on disk (docs/adr/0025)."""
