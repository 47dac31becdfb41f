"""Functions that transformers calls; the only package that touches its internals."""
