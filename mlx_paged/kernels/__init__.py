"""GPU kernels: their source texts, and what builds, plans, launches and checks them. Depends on arrays, on no pool."""
