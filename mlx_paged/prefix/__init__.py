"""Prefixes that requests share: the radix tree, detached prefixes, the folder they go to, whose keys they are."""
