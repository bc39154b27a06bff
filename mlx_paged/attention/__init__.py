"""Attention over block tables: the choice of a path, and the gather path."""
