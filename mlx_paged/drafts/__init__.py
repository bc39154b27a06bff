"""Drafts: which tokens are proposed for rows of a batch, how many, and how the model verifies them."""
