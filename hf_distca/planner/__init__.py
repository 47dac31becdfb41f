"""Layouts and tasks, chosen with Python and NumPy alone: no torch, no communication."""
