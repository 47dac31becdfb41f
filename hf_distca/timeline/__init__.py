"""Traces of ranks: written, read, joined and drawn."""
