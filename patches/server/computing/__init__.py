"""The thread that computes: its loop, what it gives up when memory is short, and how it is replaced."""
