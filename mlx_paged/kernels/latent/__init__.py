"""Attention over pages of latents (MLA): variants of its kernels, how they are cut, and their self-check."""
