"""Attention over pages of latents (MLA): prompts."""
