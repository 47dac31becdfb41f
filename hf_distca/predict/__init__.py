"""Predicted seconds: profiles of devices, shapes of models, the walk of a schedule, and what is measured."""
