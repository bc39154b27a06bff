"""The ``mlx_paged doctor`` command: what works on this machine, and how fast."""
