"""python -m mlx_paged doctor: what works on this machine, and how fast."""
