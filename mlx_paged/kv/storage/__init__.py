"""The tensors of one layer's blocks, in one of two forms, and which form a pool gets."""
