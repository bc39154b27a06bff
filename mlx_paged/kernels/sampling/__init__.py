"""The kernel that draws the tokens of a batch."""
