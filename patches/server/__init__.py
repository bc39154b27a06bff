"""What replaces names of mlx_lm/server.py, and what else of the server needs mlx-lm."""
