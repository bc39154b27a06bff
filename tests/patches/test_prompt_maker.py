"""Prompts are made in processes of their own, with bounds."""
