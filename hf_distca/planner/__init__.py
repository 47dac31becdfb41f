"""Choosing layouts and tasks. Pure Python and NumPy: no torch, no communication."""
