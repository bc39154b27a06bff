"""Products of few rows in kernels of this package, and products with quantised weights, on CUDA."""
