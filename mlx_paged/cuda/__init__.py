"""Everything that only NVIDIA GPUs use: kernel texts, their compiler and machine code, products of few rows."""
