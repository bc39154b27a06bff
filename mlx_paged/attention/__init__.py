"""Attention over block tables: which path it takes, and the gathering path."""
