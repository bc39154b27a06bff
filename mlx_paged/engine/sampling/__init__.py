"""Sampling: choose the next token of every row of a batch, in one set of operations on the device."""
