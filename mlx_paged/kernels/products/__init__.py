"""Matrix products on CUDA: of few rows, in kernels of this package, and with quantised weights."""
