"""Decides and takes decode steps: the scheduler, compiled steps, narrow products."""
