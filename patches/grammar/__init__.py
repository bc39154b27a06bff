"""Grammars for mlx-lm's tokenizers."""
