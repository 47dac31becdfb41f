"""Proves or disproves on one GPU, within ten minutes, what the tests cannot show without one.

Run: make gpu, or python -m benchmarks.gpu. `--help` lists the choices.
"""
