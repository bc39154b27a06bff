"""The tensors of one layer's blocks, in one of three forms, and the choice of the form."""
