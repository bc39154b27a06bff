"""Several processes that compute one model together: what they send each other beside the model's own reductions."""
