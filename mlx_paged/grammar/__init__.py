"""Constrained answers: which tokens a request's grammar allows next.

Nothing here imports llguidance before a grammar is compiled.
"""
