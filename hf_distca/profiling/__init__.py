"""Measurement of devices and of the links between them: the figures that `predict` reads.

Training measures them when it begins, and corrects them.
"""
