"""Several processes that compute one model together: what they tell each other beside the model's own reductions."""
