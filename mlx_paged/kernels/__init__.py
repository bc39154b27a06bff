"""GPU kernels: texts, how they are built, planned, launched and checked. Knows arrays, and no pool."""
