"""Prefixes that requests share: the radix tree, its use by a batch, files on disk, and the identity of models."""
