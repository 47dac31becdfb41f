"""Predicted seconds.

Here are profiles of devices, shapes of models, the walk of a schedule, and what is measured.
"""
