"""A decode step of a whole model as one compiled function."""
