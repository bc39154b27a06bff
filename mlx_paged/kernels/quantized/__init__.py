"""Keys and values of 8 or 4 bits: their form, and the kernels that read and write it."""
