"""The tensors of one layer's blocks, in one of three forms, and which form a pool gets."""
