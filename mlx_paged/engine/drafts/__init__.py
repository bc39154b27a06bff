"""Drafts: who proposes tokens for rows of a batch, how many, and how the model verifies them."""
