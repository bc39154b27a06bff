"""Speculation by look-up: tokens that a row is going to repeat, and the step that finds out."""
