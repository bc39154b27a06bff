"""Prefixes that requests share: blocks by keys, files on disk, and the identity of models."""
