"""Replacements for names of mlx_lm/models: attention, MLPs, blocks and models, and the attention function."""
