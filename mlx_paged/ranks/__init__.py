"""Several processes that compute one model together: the messages between them, besides the model's reductions."""
